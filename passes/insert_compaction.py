"""Close the step: ckv::compact_ advances the counters after the last layer and compacts the rows that are full."""

import dataclasses

import torch
from torch.fx import GraphModule

from ckv_compile.cache import CacheState
from ckv_compile.graph import fault
from ckv_compile.ops import cached_attention, compact_, window_attention
from ckv_compile.schedule import Schedule


def insert_compaction(graph: GraphModule, schedule: Schedule) -> int:
    """Add one guarded compaction before the output of a graph of (input_ids, *state).

    Raises:
        PassError: if no attention of the graph uses the cache.
    """
    output = graph.graph.output_node()
    if not any(node.target in (cached_attention, window_attention) for node in graph.graph.nodes):
        raise fault(output, "attention nodes with a cache before it", "none")
    input_ids, *state = (node for node in graph.graph.nodes if node.op == "placeholder")
    with graph.graph.inserting_before(output):
        steps = graph.graph.call_function(torch.ops.aten.sym_size.int, (input_ids, 1))
        graph.graph.call_function(compact_, (*CacheState(*state)[:6], steps), dataclasses.asdict(schedule))
    return 1
