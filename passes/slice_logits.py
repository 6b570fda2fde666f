"""Compute the output head on the last token only: a prompt of S tokens needs one row of logits, not S.

The head of a quantised model is a product of rows: [B, S, hidden] -> [B * S, hidden] -> product -> [B, S, vocab].
"""

import torch
from torch.fx import GraphModule, Node

from ckv_compile.graph import fault, tensor_meta

_aten = torch.ops.aten
_POINTWISE = (
    _aten.mul.Tensor,
    _aten.mul.Scalar,
    _aten.div.Tensor,
    _aten.div.Scalar,
    _aten.tanh.default,
    _aten.to.dtype,
    _aten._to_copy.default,
)
_BIASES = (_aten.add.Tensor, _aten.add_.Tensor)
_RESHAPES = (_aten.reshape.default, _aten.view.default)
_PRODUCTS = (
    _aten.linear.default,
    _aten.matmul.default,
    _aten.mm.default,
    _aten._weight_int4pack_mm_for_cpu.default,
)


def slice_logits(graph: GraphModule) -> int:
    """Slice the input of the head [B, S, hidden] to [B, 1, hidden].

    Raises:
        PassError: if the output is not a linear head, possibly scaled, capped or cast.
    """
    output = graph.graph.output_node()
    head = output.all_input_nodes[0]
    while _keeps_rows(head):
        if head.target in _RESHAPES:
            head.update_arg(1, [-1, 1, int(tensor_meta(head).shape[2])])
        head = head.all_input_nodes[0]
    if head.target not in _PRODUCTS:
        raise fault(head, "logits made by a linear head", f"{head.target}")
    rows = head.all_input_nodes[0]
    if rows.target in _RESHAPES and tensor_meta(rows).ndim == 2:
        head = rows
    hidden = head.args[0]
    assert isinstance(hidden, Node)
    if hidden.target is _aten.slice.Tensor and hidden.args[1:3] == (1, 0):
        hidden = hidden.all_input_nodes[0]  # the model's own logits_to_keep slice, which kept everything
    with graph.graph.inserting_before(head):
        last = graph.graph.call_function(_aten.slice.Tensor, (hidden, 1, -1, torch.iinfo(torch.int64).max))
    head.update_arg(0, last)
    graph.graph.eliminate_dead_code()
    return 1


def _keeps_rows(node: Node) -> bool:
    """Whether a node between head and output gives each token what it makes of that token's row alone."""
    if node.target in _BIASES:
        return all(tensor_meta(other).ndim == 1 for other in node.all_input_nodes[1:])
    if node.target in _RESHAPES:
        return tensor_meta(node).ndim == 3 and tensor_meta(node.all_input_nodes[0]).ndim == 2
    if node.target is _aten.slice.Tensor:  # of padded columns
        return (
            tensor_meta(node).ndim == 2 and tensor_meta(node).shape[0] == tensor_meta(node.all_input_nodes[0]).shape[0]
        )
    return node.target in _POINTWISE
