"""Put the clustered cache under every canonical attention.

    sdpa(q, k, v, is_causal=True, scale=s)  ->  ckv::cached_attention(q, k, v, *state, layer=i, scale=s, plan)

The graph's inputs become (input_ids, keys, values, degree, fill, active, position); position_ids is computed from the
position in the state, so the positions that RoPE sees are true whatever was merged.
"""

import dataclasses

import torch
from torch.fx import GraphModule, Node

from ckv_compile.cache import CacheShape, CacheState
from ckv_compile.graph import SDPA, attention_arguments, fault, tensor_meta
from ckv_compile.ops import cached_attention
from ckv_compile.schedule import Schedule


def insert_cached_attention(graph: GraphModule, schedule: Schedule) -> int:
    """Replace canonical SDPA nodes, in graph order: the i-th one is layer i of the cache.

    Raises:
        PassError: for an attention that canonicalize_attention has not seen, or none.
    """
    sites = _sites(graph)
    for node in sites:
        attention = attention_arguments(node)
        if attention.mask is not None or not attention.is_causal or attention.scale is None or attention.dropout:
            raise fault(node, "the canonical form of canonicalize_attention", f"arguments {attention[3:]}")
    input_ids, position_ids = (node for node in graph.graph.nodes if node.op == "placeholder")
    with graph.graph.inserting_before(position_ids.next):
        state = [graph.graph.placeholder(name) for name in CacheState._fields]
        call = graph.graph.call_function
        start = call(torch.ops.aten.unsqueeze.default, (state[-1], 1))  # position [B, 1]
        steps = call(torch.ops.aten.sym_size.int, (input_ids, 1))
        offsets = call(torch.ops.aten.arange.default, (steps,), {"device": tensor_meta(position_ids).device})  # [S]
        positions = call(torch.ops.aten.add.Tensor, (start, offsets))  # [B, S]
    position_ids.replace_all_uses_with(positions)
    graph.graph.erase_node(position_ids)

    plan = dataclasses.asdict(schedule)
    for layer, node in enumerate(sites):
        attention = attention_arguments(node)
        with graph.graph.inserting_before(node):
            cached = graph.graph.call_function(
                cached_attention,
                (attention.q, attention.k, attention.v, *state[:5], layer, attention.scale),
                plan,
            )
        cached.meta = dict(node.meta)
        node.replace_all_uses_with(cached)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    return len(sites)


def cache_shape(graph: GraphModule) -> CacheShape:
    """Read what the cache must hold from a graph of canonical attentions.

    Raises:
        PassError: if layers differ in KV heads, head size or dtype, or keys and values in head size.
    """
    sites = _sites(graph)
    shapes: list[CacheShape] = []
    for node in sites:
        attention = attention_arguments(node)
        key, value = tensor_meta(attention.k), tensor_meta(attention.v)
        if key.shape[3] != value.shape[3]:
            raise fault(node, "keys and values of one head size", f"{key.shape[3]} and {value.shape[3]}")
        shapes.append(CacheShape(len(sites), int(key.shape[1]), int(key.shape[3]), key.dtype, key.device))
        if shapes[-1] != shapes[0]:
            raise fault(node, f"the cache shape of the first layer, {shapes[0]}", f"{shapes[-1]}")
    return shapes[0]


def _sites(graph: GraphModule) -> list[Node]:
    sites = [node for node in graph.graph.nodes if node.target is SDPA]
    if not sites:
        raise fault(graph.graph.output_node(), "scaled_dot_product_attention nodes", "none")
    return sites
