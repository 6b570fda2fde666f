"""Put a cache under every canonical attention: the clustered one, or an exact ring where there is a sliding window.

    ckv::attention(q, k, v, None, sinks, scale, cap)          ->  ckv::cached_attention(q, k, v, *clustered state, ...)
    ckv::attention(q, k, v, None, sinks, scale, cap, window)  ->  ckv::window_attention(q, k, v, *ring state, ...)

The graph's inputs become (input_ids, *CacheState); position_ids is computed from the position in the state, so the
positions that RoPE sees are true whatever was merged.
"""

import dataclasses
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ckv_compile.cache import CacheShape, CacheState
from ckv_compile.graph import attention_arguments, fault, tensor_meta
from ckv_compile.ops import attention, cached_attention, window_attention
from ckv_compile.schedule import Schedule


def insert_cached_attention(graph: GraphModule, schedule: Schedule) -> int:
    """Replace canonical attention nodes, in graph order: the i-th one of each kind is layer i of its group.

    Raises:
        PassError: for an attention that canonicalize_attention has not seen, or none.
    """
    sites = _sites(graph)
    input_ids, position_ids = (node for node in graph.graph.nodes if node.op == "placeholder")
    with graph.graph.inserting_before(position_ids.next):
        placeholders: Any = [graph.graph.placeholder(name) for name in CacheState._fields]
        state = CacheState(*placeholders)
        call = graph.graph.call_function
        start = call(torch.ops.aten.unsqueeze.default, (state.position, 1))  # [B, 1]
        steps = call(torch.ops.aten.sym_size.int, (input_ids, 1))
        offsets = call(torch.ops.aten.arange.default, (steps,), {"device": tensor_meta(position_ids).device})  # [S]
        positions = call(torch.ops.aten.add.Tensor, (start, offsets))  # [B, S]
    position_ids.replace_all_uses_with(positions)
    graph.graph.erase_node(position_ids)

    plan = dataclasses.asdict(schedule)
    windowed = clustered = 0
    for node in sites:
        given = attention_arguments(node)
        tokens, rest = (given.q, given.k, given.v), (given.scale, given.sinks, given.softcap)
        with graph.graph.inserting_before(node):
            if given.window:
                ring = (state.window_keys, state.window_values, state.position, state.active)
                cached = call(window_attention, (*tokens, *ring, windowed, *rest))
            else:
                cached = call(cached_attention, (*tokens, *state[:5], clustered, *rest), plan)
        windowed, clustered = windowed + (given.window > 0), clustered + (given.window == 0)
        cached.meta = dict(node.meta)
        node.replace_all_uses_with(cached)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    return len(sites)


def cache_shape(graph: GraphModule) -> CacheShape:
    """Read what the cache must hold from a graph of canonical attentions.

    Raises:
        PassError: if layers of a kind differ in KV heads, head size or window, or layers in dtype.
    """
    groups: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
    sites = _sites(graph)
    for node in sites:
        given = attention_arguments(node)
        key = tensor_meta(given.k)  # and value: of one head size in the canonical form
        group = groups[given.window > 0]
        group.append((int(key.shape[1]), int(key.shape[3]), given.window))
        if group[-1] != group[0]:
            expected = "{} KV heads of size {} and a window of {}, as in the first layer of the kind".format(*group[0])
            raise fault(node, expected, "{}, {} and {}".format(*group[-1]))
        if key.dtype != (dtype := tensor_meta(attention_arguments(sites[0]).k).dtype):
            raise fault(node, f"the dtype of the first layer, {dtype}", f"{key.dtype}")
    first = tensor_meta(attention_arguments(sites[0]).k)
    clustered, windowed = groups[False], groups[True]
    kv_heads, head_dim, _ = (clustered or windowed)[0]
    shape = CacheShape(len(clustered), kv_heads, head_dim, first.dtype, first.device)
    if not windowed:
        return shape
    kv_heads, head_dim, window = windowed[0]
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
