"""Close the step: ckv::compact_ advances the counters after the last layer and compacts the rows that are full."""

import dataclasses

import torch
from torch.fx import GraphModule

from ckv_compile.graph import fault, inputs, state_inputs
from ckv_compile.ops import cached_attention, compact_, window_attention
from ckv_compile.schedule import Plans


def insert_compaction(graph: GraphModule, plans: Plans) -> int:
    """Add a guarded compaction of each group before the output of a graph with the state among its inputs.

    That of the main group counts the positions, also where it has no layers; that of light layers is there if they are.

    Raises:
        PassError: if no attention of the graph uses the cache.
    """
    output = graph.graph.output_node()
    sites = [node for node in graph.graph.nodes if node.target in (cached_attention, window_attention)]
    if not sites:
        raise fault(output, "attention nodes with a cache before it", "none")
    padding = inputs(graph).get("padding")
    state = state_inputs(graph)
    groups = [(state.light, None, plans.light)] if any(node.args[3] is state.light_keys for node in sites) else []
    groups.append((state.main, state.position, plans.main))
    with graph.graph.inserting_before(output):
        steps = graph.graph.call_function(torch.ops.aten.sym_size.int, (sites[0].args[0], 2))
        for slots, position, plan in groups:
            options = dataclasses.asdict(plan.schedule) | ({"padding": padding} if padding else {})
            graph.graph.call_function(compact_, (*slots[:7], position, steps), options)
    return len(groups)
