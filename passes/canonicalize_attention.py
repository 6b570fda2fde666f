"""Bring every attention of a graph into one form: causal, grouped heads, explicit scale, no mask.

    sdpa(q, repeat_kv(k), repeat_kv(v), mask)  ->  sdpa(q, k, v, is_causal=True, scale=s, enable_gqa=True)

The mask is not trusted: it is computed for concrete lengths and compared with the causal mask. A graph whose attention
is anything else is refused.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph_module import _get_attr
from torch.fx.node import map_arg

from ckv_compile.graph import SDPA, SDPA_TARGETS, Attention, attention_arguments, fault, tensor_meta

MASK_LENGTHS = (2, 3, 33)
LARGEST_MASK = 4096
"""Longest mask that is computed to prove it causal: a few tensors of 128 MiB."""
NO_BOUND = 2**31
"""Numbers from here on mean "to the end", or minus infinity in an additive mask."""

_aten = torch.ops.aten
_VIEWS = (
    _aten.reshape.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.flatten.using_ints,
    _aten.contiguous.default,
    _aten.clone.default,
)
_SOFTMAXES = (_aten.softmax.int, _aten._softmax.default)
_DROPOUTS = (_aten.dropout.default, _aten.native_dropout.default, _aten.dropout_.default)


def canonicalize_attention(graph: GraphModule, layers: int) -> int:
    """Rewrite all SDPA nodes of a graph with placeholders (input_ids, position_ids).

    Args:
        graph: the graph to change.
        layers: attention layers of the model; as many SDPA nodes must be there.

    Raises:
        PassError: for dropout, an attention that is not SDPA, a mask that is not causal, or heads that cannot be
            grouped.
    """
    for node in graph.graph.nodes:
        if node.target in _DROPOUTS and (node.args[2:] or (node.kwargs.get("train", True),))[0] and node.args[1] > 0.0:
            raise fault(node, "no dropout", f"dropout with p={node.args[1]}: call model.eval() first")
    sites = [node for node in graph.graph.nodes if node.target in SDPA_TARGETS]
    if len(sites) != layers:
        other = [node for node in graph.graph.nodes if node.target in _SOFTMAXES]
        culprit = (other or sites or [graph.graph.output_node()])[0]
        hint = f", and {len(other)} softmax nodes: an attention that does not call SDPA?" if other else ""
        raise fault(culprit, f"{layers} scaled_dot_product_attention nodes, one a layer", f"{len(sites)}{hint}")
    proven: set[Node] = set()
    for node in sites:
        attention = attention_arguments(node)
        if attention.dropout > 0.0:
            raise fault(node, "no dropout", f"attention dropout with p={attention.dropout}: call model.eval() first")
        _require_causal(graph, node, attention, proven)
        q, k, v = attention.q, _grouped(attention.k), _grouped(attention.v)
        heads, kv_heads, dim = tensor_meta(q).shape[1], tensor_meta(k).shape[1], tensor_meta(q).shape[3]
        if kv_heads != tensor_meta(v).shape[1] or heads % kv_heads:
            raise fault(node, "KV heads that divide the query heads", f"{heads} query and {kv_heads} key heads")
        scale = dim**-0.5 if attention.scale is None else attention.scale
        with graph.graph.inserting_before(node):
            canonical = graph.graph.call_function(
                SDPA, (q, k, v, None, 0.0, True), {"scale": scale, "enable_gqa": True}
            )
        canonical.meta = dict(node.meta)
        node.replace_all_uses_with(canonical)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    return len(sites)


def _grouped(node: Node) -> Node:
    """Look through repeat_kv: reshape(expand(unsqueeze(x, 2))) of [B, Hkv, S, D], or repeat_interleave on heads."""
    heads = tensor_meta(node).shape[1]
    if node.target is _aten.repeat_interleave.self_int:
        source = _first(node)
        shape, own = tensor_meta(node).shape, tensor_meta(source).shape
        return source if len(own) == len(shape) == 4 and (shape[0], *shape[2:]) == (own[0], *own[2:]) else node
    inner = _skip(node, _VIEWS)
    if inner is node or inner.target is not _aten.expand.default:
        return node
    shape = tensor_meta(inner).shape  # [B, Hkv, G, S, D]
    source = _skip(_first(inner), (_aten.slice.Tensor,))
    if len(shape) != 5 or shape[1] * shape[2] != heads or source.target is not _aten.unsqueeze.default:
        return node
    if source.args[1] not in (2, -3):
        return node
    # Slices around the unsqueeze come from indexing with `:` and take everything.
    return _skip(_first(source), (_aten.slice.Tensor,))


def _skip(node: Node, targets: tuple[object, ...]) -> Node:
    """Follow first arguments through calls to `targets` that keep all elements."""
    while node.target in targets and tensor_meta(_first(node)).numel() == tensor_meta(node).numel():
        node = _first(node)
    return node


def _first(node: Node) -> Node:
    argument = node.args[0]
    assert isinstance(argument, Node)
    return argument


def _require_causal(graph: GraphModule, node: Node, attention: Attention, proven: set[Node]) -> None:
    """Prove that query i sees exactly the keys 0..i, or refuse.

    A mask is computed from (input_ids, position_ids) for several lengths: a few short ones, and two more than every
    number that occurs in its computation, so that a window or a chunk of that size must show.
    """
    queries, keys = tensor_meta(attention.q).shape[2], tensor_meta(attention.k).shape[2]
    if queries != keys:
        raise fault(node, "as many keys as queries", f"{keys} keys for {queries} queries: a learned prefix?")
    if attention.mask is None:
        if not attention.is_causal:
            raise fault(node, "causal attention", "attention without a mask: every token sees the later ones")
        return
    if attention.is_causal:
        raise fault(node, "a mask or is_causal", "both")
    if attention.mask in proven:
        return
    cone = _ancestors(attention.mask)
    input_ids, position_ids = (n for n in graph.graph.nodes if n.op == "placeholder")
    lengths = {*MASK_LENGTHS}
    for ancestor in cone:
        if ancestor.op == "placeholder" and ancestor not in (position_ids, input_ids):
            raise fault(node, "a mask made of positions", f"a mask that depends on the input {ancestor.name}")
        if input_ids in ancestor.all_input_nodes and ancestor.target is not _aten.sym_size.int:
            raise fault(node, "a mask made of positions", f"a mask that depends on the token ids, at {ancestor.name}")
        for number in _numbers(graph, ancestor):
            # A reciprocal, as in distance * (1 / window), is the window too.
            for bound in (number, 1 / number if number else 0):
                if 1 < bound < LARGEST_MASK:
                    lengths.add(math.ceil(bound) + 2)
                elif LARGEST_MASK <= bound < NO_BOUND:
                    raise fault(node, "a plain causal mask", f"a mask that holds the number {bound:g}: a window?")
    for length in sorted(lengths):
        for offset in (0, 5):
            positions = torch.arange(offset, offset + length)[None]
            feed = {input_ids: torch.zeros(1, length, dtype=torch.int64), position_ids: positions}
            if not _is_causal(_evaluate(graph, attention.mask, cone, feed), length):
                raise fault(
                    node,
                    "a plain causal mask",
                    f"a mask that is not causal at a length of {length} tokens: a sliding window, a prefix or a block "
                    "mask cannot be served by one clustered cache",
                )
    proven.add(attention.mask)


def _ancestors(node: Node) -> set[Node]:
    seen: set[Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo += current.all_input_nodes
    return seen


def _numbers(graph: GraphModule, node: Node) -> list[float]:
    """Absolute values of the numbers that a node brings in: its constants, a constant tensor's sizes and few values."""
    if node.op == "get_attr":
        tensor = _get_attr(graph, str(node.target))
        values = tensor.flatten().tolist() if tensor.numel() <= 64 else []
        # Less two, since a mask of that size serves no longer prompt.
        return [*(float(size - 2) for size in tensor.shape), *(abs(float(value)) for value in values)]
    found: list[float] = []

    def visit(argument: object) -> None:
        if isinstance(argument, list | tuple):
            for item in argument:
                visit(item)
        elif isinstance(argument, int | float) and not isinstance(argument, bool):
            found.append(abs(float(argument)))

    visit(node.args)
    visit(list(node.kwargs.values()))
    return found


def _evaluate(graph: GraphModule, target: Node, cone: set[Node], feed: dict[Node, Tensor]) -> Tensor:
    """Compute one node of the graph on the CPU from concrete placeholders."""
    values: dict[Node, Any] = {}
    for node in graph.graph.nodes:
        if node not in cone:
            continue
        if node.op == "placeholder":
            values[node] = feed[node]
        elif node.op == "get_attr":
            values[node] = _get_attr(graph, str(node.target)).detach().cpu().clone()  # the graph may write to it
        else:
            args = map_arg(node.args, lambda n: values[n])
            kwargs = map_arg(node.kwargs, lambda n: values[n])
            if "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            values[node] = node.target(*args, **kwargs)
    result = values[target]
    assert isinstance(result, Tensor)
    return result


def _is_causal(mask: Tensor, length: int) -> bool:
    """Whether a boolean mask, or an additive one of zeros and very negative numbers, is the causal mask."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    if mask.shape[-2:] != causal.shape:
        return False
    if mask.dtype == torch.bool:
        return bool((mask == causal).all())
    hidden = torch.finfo(mask.dtype).min / 2
    return bool(torch.where(causal, mask == 0, mask <= hidden).all())
