"""Compute the output head on the last token only: a prompt of S tokens needs one row of logits, not S."""

import torch
from torch.fx import GraphModule, Node

from ckv_compile.graph import fault

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


def slice_logits(graph: GraphModule) -> int:
    """Slice the input of the head [B, S, hidden] to [B, 1, hidden].

    Raises:
        PassError: if the output is not a linear head, possibly scaled, capped or cast.
    """
    output = graph.graph.output_node()
    head = output.all_input_nodes[0]
    while head.target in _POINTWISE:
        head = head.all_input_nodes[0]
    if head.target is not _aten.linear.default:
        raise fault(head, "logits made by a linear head", f"{head.target}")
    hidden = head.args[0]
    assert isinstance(hidden, Node)
    if hidden.target is _aten.slice.Tensor and hidden.args[1:3] == (1, 0):
        hidden = hidden.all_input_nodes[0]  # the model's own logits_to_keep slice, which kept everything
    with graph.graph.inserting_before(head):
        last = graph.graph.call_function(_aten.slice.Tensor, (hidden, 1, -1, torch.iinfo(torch.int64).max))
    head.update_arg(0, last)
    graph.graph.eliminate_dead_code()
    return 1
