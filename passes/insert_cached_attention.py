"""Put a cache under every canonical attention: the clustered one, or an exact ring where there is a sliding window.

    ckv::attention(q, k, v, None, sinks, scale, cap)          ->  ckv::cached_attention(q, k, v, *group's state, ...)
    ckv::attention(q, k, v, None, sinks, scale, cap, window)  ->  ckv::window_attention(q, k, v, *ring state, ...)

The graph's inputs become (input_ids, *CacheState); position_ids is computed from the position in the state, so the
positions that RoPE sees are true whatever was merged.

A graph that Dynamo traced with a `ClusteredCache` has the state among its inputs already, hands it the new tokens by
`k, v = ckv::update(k, v, *state, ...)`, and may have an input `padding` [B], the columns of a prompt to be skipped.
"""

import dataclasses
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ckv_compile.cache import CacheShape, CacheState, Group
from ckv_compile.errors import ConfigError
from ckv_compile.graph import attention_arguments, fault, inputs, state_inputs, tensor_meta
from ckv_compile.ops import attention, cached_attention, update, window_attention
from ckv_compile.schedule import Plans

_aten = torch.ops.aten


def insert_cached_attention(graph: GraphModule, plans: Plans, light_layers: Collection[int] = ()) -> int:
    """Replace canonical attention nodes, in graph order: the i-th one of each kind is layer i of its group.

    Args:
        graph: the graph.
        plans: how each group is compacted.
        light_layers: numbers of the nodes that are light layers.

    Raises:
        PassError: for an attention that canonicalize_attention has not seen, or none.
    """
    sites = _sites(graph)
    given_inputs = inputs(graph)
    position_ids, padding = given_inputs.get("position_ids"), given_inputs.get("padding")
    has_cache = "keys" in given_inputs
    if not has_cache:
        assert position_ids is not None
        with graph.graph.inserting_before(position_ids.next):
            for name in CacheState._fields:
                graph.graph.placeholder(name)
    state = state_inputs(graph)
    if position_ids is not None:
        _count_positions(graph, position_ids, state.position, padding)
    if position_ids is not None and not has_cache:
        graph.graph.erase_node(position_ids)

    call = graph.graph.call_function
    skip: dict[str, Any] = {"padding": padding} if padding else {}
    groups = groups_of(sites, light_layers)
    for number, (node, group) in enumerate(zip(sites, groups, strict=True)):
        given, layer = attention_arguments(node), groups[:number].count(group)
        tokens = (given.q, _before_update(given.k), _before_update(given.v))
        rest = (given.scale, given.sinks, given.softcap)
        with graph.graph.inserting_before(node):
            if group == "window":
                ring = (state.window_keys, state.window_values, state.position, state.active)
                cached = call(window_attention, (*tokens, *ring, layer, *rest), skip)
            else:
                slots, plan = (state.light, plans.light) if group == "light" else (state.main, plans.main)
                options = dataclasses.asdict(plan.schedule) | skip
                cached = call(cached_attention, (*tokens, *slots, layer, *rest), options)
        cached.meta = dict(node.meta)
        node.replace_all_uses_with(cached)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    return len(sites)


def _count_positions(graph: GraphModule, position_ids: Node, position: Node, padding: Node | None) -> None:
    """Compute what is read as position_ids [B or 1, S] from the position in the state [B]."""
    input_ids, call = inputs(graph).get("input_ids", position_ids), graph.graph.call_function
    with graph.graph.inserting_before(graph.graph.find_nodes(op="placeholder")[-1].next):
        if padding is not None:
            position = call(_aten.sub.Tensor, (position, padding))
        if tensor_meta(position_ids).shape[0] == 1:  # for rows that are alike
            position = call(_aten.slice.Tensor, (position, 0, 0, 1))
        start = call(_aten.unsqueeze.default, (position, 1))  # [B, 1]
        steps = call(_aten.sym_size.int, (input_ids, 1))
        offsets = call(_aten.arange.default, (steps,), {"device": tensor_meta(position_ids).device})  # [S]
        positions = call(_aten.add.Tensor, (start, offsets))  # [B, S]
        if padding is not None:
            positions = call(_aten.clamp_min.default, (positions, 0))
    position_ids.replace_all_uses_with(positions, delete_user_cb=lambda user: user is not steps)


def _before_update(node: Node) -> Node:
    """What a model handed to `ckv::update`, of what it got back."""
    if node.target is operator.getitem and (source := node.all_input_nodes[0]).target is update:
        return source.all_input_nodes[node.args[1]]  # type: ignore[index]
    return node


def groups_of(sites: Sequence[Node], light_layers: Collection[int]) -> list[Group]:
    """The group of every canonical attention.

    Raises:
        ConfigError: for a light layer that there is not, or that has a sliding window.
    """
    groups: list[Group] = ["window" if attention_arguments(node).window else "main" for node in sites]
    for layer in light_layers:
        if not layer < len(groups):
            raise ConfigError(
                f"light_layers: {layer} is no layer of this model, whose layers are 0 to {len(groups) - 1}"
            )
        if groups[layer] == "window":
            raise ConfigError(f"light_layers: layer {layer} has a sliding window, which stays as it is: leave it out")
        groups[layer] = "light"
    return groups


def cache_shape(graph: GraphModule, light_layers: Collection[int] = ()) -> CacheShape:
    """Read what the cache must hold from a graph of canonical attentions.

    Raises:
        PassError: if layers of a kind differ in heads, head size or window, or layers in dtype.
        ConfigError: for a light layer that there is not, or that has a sliding window.
    """
    groups: dict[bool, list[tuple[int, int, int, int]]] = {False: [], True: []}
    sites = _sites(graph)
    for node in sites:
        given = attention_arguments(node)
        key = tensor_meta(given.k)  # and value: of one head size in the canonical form
        group = groups[given.window > 0]
        heads = int(tensor_meta(given.q).shape[1])
        group.append((heads, int(key.shape[1]), int(key.shape[3]), given.window))
        if group[-1] != group[0]:
            expected = "{} query and {} KV heads of size {} and a window of {}, as in the first layer of the kind"
            raise fault(node, expected.format(*group[0]), "{}, {}, {} and {}".format(*group[-1]))
        if key.dtype != (dtype := tensor_meta(attention_arguments(sites[0]).k).dtype):
            raise fault(node, f"the dtype of the first layer, {dtype}", f"{key.dtype}")
    first = tensor_meta(attention_arguments(sites[0]).k)
    clustered, windowed = groups[False], groups[True]
    heads, kv_heads, head_dim, _ = (clustered or windowed)[0]
    light = tuple(number for number, group in enumerate(groups_of(sites, light_layers)) if group == "light")
    sizes = (kv_heads, heads // kv_heads, head_dim, first.dtype, first.device)
    shape = CacheShape(len(clustered) - len(light), *sizes, light_layers=light)
    if not windowed:
        return shape
    _, kv_heads, head_dim, window = windowed[0]
    return shape._replace(
        window=window, window_layers=len(windowed), window_kv_heads=kv_heads, window_head_dim=head_dim
    )


def _sites(graph: GraphModule) -> list[Node]:
    sites = [node for node in graph.graph.nodes if node.target is attention]
    if not sites:
        raise fault(graph.graph.output_node(), "ckv::attention nodes", "none")
    for node in sites:
        given = attention_arguments(node)
        if given.mask is not None or given.scale is None:
            raise fault(node, "the canonical form of canonicalize_attention", f"arguments {given[3:]}")
    return sites
