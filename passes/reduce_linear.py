"""Write a linear layer on one row as a reduction, which Inductor turns into a parallel loop that streams the weight.

    linear(x [1, 1, K], W [N, K], b)       ->  sum(x * W, -1) + b
    mm(x [1, K], to(Q.t() [K, N], dtype))  ->  sum(x * Q, -1)

A matrix product of one row is a pass over the weight; the libraries behind aten.linear run it on one CPU thread. The
reduction accumulates in float32 and only pays when a compiler fuses it, so it is for compiled CPU decode programs. The
compiler then fuses what makes the weight too: the loop over a quantised one reads its integers.
"""

import torch
from torch.fx import GraphModule, Node

from ckv_compile.graph import tensor_meta

_aten = torch.ops.aten
_TRANSPOSED = (_aten.mm.default, _aten.matmul.default)


def reduce_linear(graph: GraphModule) -> int:
    """Rewrite linear layers whose input has a single row; leave the others alone."""
    import torch._inductor.inductor_prims  # registers the op below

    in_memory = torch.ops.prims.inductor_force_stride_order.default
    targets = (_aten.linear.default, *_TRANSPOSED)
    sites = [node for node in graph.graph.nodes if node.target in targets and _is_one_row(node)]
    for node in sites:
        x, weight, *bias = node.args
        dtype = tensor_meta(node).dtype
        wide = torch.promote_types(dtype, torch.float32)
        with graph.graph.inserting_before(node):
            call = graph.graph.call_function
            # Else Inductor computes x again for each of the N sums, and reads int8 beside bfloat16 in slow pieces.
            row = call(in_memory, (call(_aten.to.dtype, (x, wide)), _strides(tensor_meta(x).shape)))
            weight = _integers(weight)
            if node.target in _TRANSPOSED:
                weight = call(_aten.t.default, (weight,))
            column = call(_aten.unsqueeze.default, (row, -2))  # [..., 1, K]
            product = call(_aten.mul.Tensor, (column, call(_aten.to.dtype, (weight, wide))))  # [..., N, K]
            total = call(_aten.sum.dim_IntList, (product, [-1]))  # [..., N]
            if bias and bias[0] is not None:
                total = call(_aten.add.Tensor, (total, bias[0]))
            result = call(_aten.to.dtype, (total, dtype))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    return len(sites)


def _is_one_row(node: Node) -> bool:
    x, weight = node.all_input_nodes[:2]
    value, matrix = tensor_meta(x), tensor_meta(weight)
    if node.target in _TRANSPOSED and (matrix.ndim != 2 or matrix.stride(0) != 1):  # sums run along the memory
        return False
    return value.is_floating_point() and value.numel() == value.shape[-1] and matrix.dtype == value.dtype


def _integers(weight: Node) -> Node:
    """The int8 weight that was cast to the dtype of the product, which any floating dtype holds exactly."""
    if weight.target is _aten.to.dtype and tensor_meta(source := weight.all_input_nodes[0]).dtype == torch.int8:
        return source
    return weight


def _strides(shape: torch.Size) -> list[int]:
    """Strides of a contiguous tensor of one row."""
    return [*[int(shape[-1])] * (len(shape) - 1), 1]
