"""Close the step: ckv::compact_ advances the counters after the last layer and compacts the rows that are full."""

import dataclasses

import torch
from torch.fx import GraphModule

from ckv_compile.graph import fault, inputs, state_inputs
from ckv_compile.ops import cached_attention, compact_, window_attention
from ckv_compile.schedule import Schedule


def insert_compaction(graph: GraphModule, schedule: Schedule) -> int:
    """Add one guarded compaction before the output of a graph with the state among its inputs.

    Raises:
        PassError: if no attention of the graph uses the cache.
    """
    output = graph.graph.output_node()
    sites = [node for node in graph.graph.nodes if node.target in (cached_attention, window_attention)]
    if not sites:
        raise fault(output, "attention nodes with a cache before it", "none")
    padding = inputs(graph).get("padding")
    plan = dataclasses.asdict(schedule) | ({"padding": padding} if padding else {})
    with graph.graph.inserting_before(output):
        steps = graph.graph.call_function(torch.ops.aten.sym_size.int, (sites[0].args[0], 2))
        graph.graph.call_function(compact_, (*state_inputs(graph)[:8], steps), plan)
    return 1
