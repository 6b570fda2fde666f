"""Helpers that passes share: reading a node, its module, and the arguments of an attention call."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from ckv_compile.errors import PassError

SDPA = torch.ops.aten.scaled_dot_product_attention.default
SDPA_TARGETS = (SDPA, F.scaled_dot_product_attention)
"""The forms in which attention arrives: from torch.export, and from Dynamo."""


class Attention(NamedTuple):
    """The arguments of one scaled-dot-product attention call."""

    q: Node
    k: Node
    v: Node
    mask: Node | None
    dropout: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def attention_arguments(node: Node) -> Attention:
    """Read an SDPA node, whichever of its arguments were passed by position."""
    names = ("q", "k", "v", "mask", "dropout", "is_causal")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False))
    keywords = {"query": "q", "key": "k", "value": "v", "attn_mask": "mask", "dropout_p": "dropout"}
    given |= {keywords.get(name, name): value for name, value in node.kwargs.items()}
    defaults = {"mask": None, "dropout": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    return Attention(**(defaults | given))


def tensor_meta(node: Node) -> Tensor:
    """The fake tensor that stands for the node's value."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, Tensor):
        raise fault(node, "a node with a recorded tensor value", f"{type(value).__name__}")
    return value


def module_path(node: Node) -> str:
    """Path of the module that a node was traced from, as in `model.layers.3.self_attn`."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(entry[0]) for entry in stack.values() if entry[0]]
    return paths[-1].removeprefix("model.") if paths else "(root)"


def fault(node: Node, expected: str, found: str) -> PassError:
    """Return the error of a pass that must not go on, with the node and its module."""
    return PassError(node.name, module_path(node), expected, found)
