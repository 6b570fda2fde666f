"""Write a linear layer on one row as a reduction, which Inductor turns into a parallel loop that streams the weight.

    linear(x [1, 1, K], W [N, K], b)  ->  sum(x * W, -1) + b

A matrix product of one row is a pass over the weight; the libraries behind aten.linear run it on one CPU thread. The
reduction accumulates in float32 and only pays when a compiler fuses it, so it is for compiled CPU decode programs.
"""

import torch
from torch.fx import GraphModule, Node

from ckv_compile.graph import tensor_meta

_aten = torch.ops.aten


def reduce_linear(graph: GraphModule) -> int:
    """Rewrite linear nodes whose input has a single row; leave the others alone."""
    sites = [node for node in graph.graph.nodes if node.target is _aten.linear.default and _is_one_row(node)]
    for node in sites:
        x, weight, *bias = node.args
        dtype = tensor_meta(node).dtype
        wide = torch.promote_types(dtype, torch.float32)
        with graph.graph.inserting_before(node):
            call = graph.graph.call_function
            column = call(_aten.unsqueeze.default, (call(_aten.to.dtype, (x, wide)), -2))  # [1, 1, 1, K]
            product = call(_aten.mul.Tensor, (column, call(_aten.to.dtype, (weight, wide))))  # [1, 1, N, K]
            total = call(_aten.sum.dim_IntList, (product, [-1]))  # [1, 1, N]
            if bias and bias[0] is not None:
                total = call(_aten.add.Tensor, (total, bias[0]))
            result = call(_aten.to.dtype, (total, dtype))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.graph.erase_node(node)
    return len(sites)


def _is_one_row(node: Node) -> bool:
    x, weight = node.all_input_nodes[:2]
    value = tensor_meta(x)
    return value.is_floating_point() and value.numel() == value.shape[-1] and tensor_meta(weight).dtype == value.dtype
