"""Choose one set of rotary frequencies for good, where a model changes them with the length of its input (longrope).

    copy_(inv_freq, where(max(position_ids) + 1 > original length, long, short))  ->  long, or short

A cache holds keys that were rotated before: frequencies that change on the way would mix two rotations, and the longest
row of a batch would choose for all others. So the longest context chooses, once.
"""

import torch
from torch.fx import GraphModule

from ckv_compile.graph import ancestors, evaluate, fault, tensor_meta

_aten = torch.ops.aten


def freeze_rotary(graph: GraphModule, context: int | None = None) -> int:
    """Replace each choice that depends on the largest position by what it is for `context` tokens (None: a few).

    Raises:
        PassError: for a graph that writes to a buffer of the model in another way.
    """
    input_ids, position_ids = (node for node in graph.graph.nodes if node.op == "placeholder")
    feed = {node: torch.full((1, 1), (context or 1) - 1) for node in (input_ids, position_ids)}
    sites = 0
    for node in list(graph.graph.nodes):
        if node.target is _aten.where.self and tensor_meta(node.args[0]).numel() == 1:
            condition, if_true, if_false = node.args
            if position_ids in ancestors(condition):
                node.replace_all_uses_with(if_true if bool(evaluate(graph, condition, feed)) else if_false)
                sites += 1
        elif node.target is _aten.copy_.default and node.args[0].op == "get_attr":
            if not sites:
                raise fault(node, "a forward that leaves its buffers alone", f"a write to {node.args[0].target}")
            node.replace_all_uses_with(node.args[1])
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    return sites
