"""Helpers that passes share: reading a node, its module, and the arguments of an attention call."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph_module import _get_attr
from torch.fx.node import map_arg

from ckv_compile.cache import CacheState
from ckv_compile.errors import PassError
from ckv_compile.ops import attention

ATTENTION_TARGETS = (
    torch.ops.aten.scaled_dot_product_attention.default,
    F.scaled_dot_product_attention,
    attention,
)
"""The forms in which attention arrives: from torch.export, from Dynamo, and from transformers' attention interface."""


class Attention(NamedTuple):
    """The arguments of one attention call in any of these forms."""

    q: Node
    k: Node
    v: Node
    mask: Node | None
    dropout: float
    is_causal: bool
    scale: float | None
    sinks: Node | None
    softcap: float
    window: int


def attention_arguments(node: Node) -> Attention:
    """Read an attention node, whichever of its arguments were passed by position."""
    is_ours = node.target is attention
    rest = ("sinks", "scale", "softcap", "window") if is_ours else ("dropout", "is_causal")
    given: dict[str, Any] = dict(zip(("q", "k", "v", "mask", *rest), node.args, strict=False))
    keywords = {"query": "q", "key": "k", "value": "v", "attn_mask": "mask", "dropout_p": "dropout"}
    given |= {keywords.get(name, name): value for name, value in node.kwargs.items()}
    # Ours is causal unless a mask says otherwise.
    defaults = {"mask": None, "dropout": 0.0, "is_causal": is_ours and given.get("mask") is None, "scale": None}
    defaults |= {"sinks": None, "softcap": 0.0, "window": 0}
    given.pop("enable_gqa", None)  # the shapes say it
    return Attention(**(defaults | given))


def inputs(graph: GraphModule) -> dict[str, Node]:
    """The placeholders of a graph, by name."""
    return {str(node.target): node for node in graph.graph.find_nodes(op="placeholder")}


def state_inputs(graph: GraphModule) -> Any:
    """The placeholders of the state, as a `CacheState` of nodes."""
    given: Any = inputs(graph)
    return CacheState(*(given[name] for name in CacheState._fields))


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


def ancestors(node: Node) -> set[Node]:
    """The node and all that its value is computed from."""
    seen: set[Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo += current.all_input_nodes
    return seen


def evaluate(
    graph: GraphModule, target: Node, feed: dict[Node, Tensor], number: Callable[[Any], Any] = lambda value: value
) -> Tensor:
    """Compute one node of the graph on the CPU from concrete placeholders.

    Args:
        graph: the graph of the node.
        target: the node.
        feed: values of the placeholders that it is computed from.
        number: replaces the numbers in the arguments of the nodes.
    """
    cone = ancestors(target)
    values: dict[Node, Any] = {}

    def argument(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(argument(item) for item in value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else value

    for node in graph.graph.nodes:
        if node not in cone:
            continue
        if node.op == "placeholder":
            values[node] = feed[node]
        elif node.op == "get_attr":
            values[node] = _get_attr(graph, str(node.target)).detach().cpu().clone()  # the graph may write to it
        else:
            args = map_arg(tuple(argument(value) for value in node.args), lambda n: values[n])
            kwargs = map_arg({name: argument(value) for name, value in node.kwargs.items()}, lambda n: values[n])
            values[node] = node.target(*args, **kwargs)
    result = values[target]
    assert isinstance(result, Tensor)
    return result


def table_limits(graph: GraphModule) -> tuple[int, int | None]:
    """Token ids and positions that a graph of (input_ids, position_ids) has table rows for; None if positions are free.

    A position behind the last row of a table of learned positions, or of precomputed angles, cannot be looked up.
    """
    input_ids, position_ids = (node for node in graph.graph.nodes if node.op == "placeholder")
    feed = {node: torch.zeros(1, 1, dtype=torch.int64) for node in (input_ids, position_ids)}
    limits: dict[Node, list[int]] = {input_ids: [], position_ids: []}
    aten = torch.ops.aten
    for node in graph.graph.nodes:
        if node.target is aten.embedding.default:
            table, dim, index = node.args[0], 0, node.args[1]
        elif node.target in (aten.gather.default, aten.index_select.default):
            table, dim, index = node.args[:3]
        elif node.target is aten.index.Tensor and len(node.args[1]) == 1:
            table, dim, index = node.args[0], 0, node.args[1][0]
        else:
            continue
        rows, cone = tensor_meta(table).shape[dim], ancestors(index)
        read = {source for source in limits if any(source is n or _reads(n, source) for n in cone)}
        tables = any(n.op == "get_attr" and tensor_meta(n).numel() > 1 for n in cone)
        if len(read) == 1 and isinstance(rows, int) and not tables:
            limits[read.pop()].append(rows - int(evaluate(graph, index, feed).max()))
    vocabulary = min(limits[input_ids], default=0)
    if not vocabulary:
        raise fault(graph.graph.output_node(), "an embedding of the token ids", "none")
    return vocabulary, min(limits[position_ids], default=None)


def _reads(node: Node, source: Node) -> bool:
    """Whether a node computes with the values of `source`, not with its size alone."""
    return source in node.all_input_nodes and node.target is not torch.ops.aten.sym_size.int


def fault(node: Node, expected: str, found: str) -> PassError:
    """Return the error of a pass that must not go on, with the node and its module."""
    return PassError(node.name, module_path(node), expected, found)
