"""Bring every attention of a graph into one form: causal or windowed, grouped heads, explicit scale, no mask.

    sdpa(q, repeat_kv(k), repeat_kv(v), mask)      ->  ckv::attention(q, k, v, None, None, scale)
    ckv::attention(q, k, v, mask, sinks, scale, c)  ->  ckv::attention(q, k, v, None, sinks, scale, c, window)

Keys and values of different head sizes (latent attention) get zeros up to the larger one, which changes no score.

The mask is not trusted: it is computed for concrete lengths and compared with the causal mask and with sliding windows.
A graph whose attention is anything else is refused.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph_module import _get_attr

from ckv_compile.errors import PassError
from ckv_compile.graph import (
    ATTENTION_TARGETS,
    Attention,
    ancestors,
    attention_arguments,
    evaluate,
    fault,
    tensor_meta,
)
from ckv_compile.ops import attention

MASK_LENGTHS = (2, 3, 33)
LARGEST_MASK = 1024
"""Longest mask that is computed as it is; larger numbers are proven to be windows by smaller ones in their place."""
LONGEST_MASK = 4096
"""Longest mask that is computed at all: a few tensors of 128 MiB."""
STAND_INS = (19, 37)
"""What stands in for such a number."""
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
_STEPS = (
    _aten.floor_divide,
    _aten.remainder,
    _aten.fmod,
    _aten.bitwise_right_shift,
    _aten.bitwise_left_shift,
    _aten.__rshift__,
    _aten.__lshift__,
)
_FACTORS = (_aten.mul, _aten.div)
_SOFTMAXES = (_aten.softmax.int, _aten._softmax.default)
_DROPOUTS = (_aten.dropout.default, _aten.native_dropout.default, _aten.dropout_.default)


Prover = Callable[[GraphModule, Node, Attention], int]
"""Returns the window of an attention node, 0 for plain causal attention, or raises a PassError."""


def canonicalize_attention(
    graph: GraphModule, layers: int | None = None, context: int | None = None, prove: Prover | None = None
) -> int:
    """Rewrite all attention nodes of a graph.

    Args:
        graph: the graph to change, with placeholders (input_ids, position_ids).
        layers: attention layers of the model, if known; at least as many attention nodes must be there.
        context: longest context of the model, if known; a window of at least as many tokens counts as none.
        prove: how masks are proven, where that is not by evaluating them at several lengths.

    Raises:
        PassError: for dropout, an attention that is not SDPA, a mask that is neither causal nor a sliding window, or
            heads that cannot be grouped.
    """
    for node in graph.graph.nodes:
        if node.target in _DROPOUTS and (node.args[2:] or (node.kwargs.get("train", True),))[0] and node.args[1] > 0.0:
            raise fault(node, "no dropout", f"dropout with p={node.args[1]}: call model.eval() first")
    sites = [node for node in graph.graph.nodes if node.target in ATTENTION_TARGETS]
    if len(sites) < (layers or 1):  # more where a layer runs several times or calls attention twice
        raise _miscounted(graph, sites, layers)
    proven: dict[Node, int] = {}
    prove = prove or functools.partial(_prove_window, proven=proven)
    for node in sites:
        given = attention_arguments(node)
        if given.dropout > 0.0:
            raise fault(node, "no dropout", f"attention dropout with p={given.dropout}: call model.eval() first")
        window = prove(graph, node, given)
        if context is not None and window >= context:
            window = 0
        q, k, v = given.q, ungrouped(given.k), ungrouped(given.v)
        heads, kv_heads, dim = tensor_meta(q).shape[1], tensor_meta(k).shape[1], tensor_meta(q).shape[3]
        if kv_heads != tensor_meta(v).shape[1] or heads % kv_heads:
            raise fault(node, "KV heads that divide the query heads", f"{heads} query and {kv_heads} key heads")
        scale = dim**-0.5 if given.scale is None else given.scale
        value_dim = tensor_meta(v).shape[3]
        with graph.graph.inserting_before(node):
            q, k, v = (_padded(graph, tensor, max(dim, value_dim)) for tensor in (q, k, v))
            canonical = graph.graph.call_function(attention, (q, k, v, None, given.sinks, scale, given.softcap, window))
            canonical.meta = node.meta | {"val": tensor_meta(q)}
            out = canonical
            if value_dim < dim:
                out = graph.graph.call_function(_aten.slice.Tensor, (canonical, 3, 0, value_dim))
                out.meta = dict(node.meta)
        node.replace_all_uses_with(out)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    return len(sites)


def _padded(graph: GraphModule, node: Node, size: int) -> Node:
    """Zeros behind the last dimension of [B, H, S, D], up to D = size."""
    missing = size - int(tensor_meta(node).shape[3])
    if not missing:
        return node
    padded = graph.graph.call_function(_aten.constant_pad_nd.default, (node, [0, missing]))
    padded.meta = node.meta | {"val": F.pad(tensor_meta(node), (0, missing))}
    return padded


def _miscounted(graph: GraphModule, sites: list[Node], layers: int | None) -> PassError:
    """The error of a graph with too few or too many attention nodes: names the first layer that is different."""
    expected = "attention nodes" if layers is None else f"{layers} scaled_dot_product_attention nodes, one a layer"
    # A softmax over as many scores as there are tokens, not over experts.
    softmaxes = [
        node
        for node in graph.graph.nodes
        if node.target in _SOFTMAXES and not isinstance(tensor_meta(node).shape[-1], int)
    ]
    if softmaxes:
        hint = f"{len(sites)}, and {len(softmaxes)} softmax nodes: an attention that does not call SDPA?"
        return fault(softmaxes[0], expected, hint)
    layer_of = {node: path for node in graph.graph.nodes if (path := _layer(node))}
    without = [node for node, path in layer_of.items() if path not in {layer_of.get(site) for site in sites}]
    if not without:
        return fault((sites or [graph.graph.output_node()])[-1], expected, f"{len(sites)}")
    layer = layer_of[without[0]]
    classes = {
        str(getattr(kind, "__name__", kind)).rpartition(".")[2]: None
        for node in without
        for path, kind in node.meta["nn_module_stack"].values()
        if re.fullmatch(rf"(.*\.)?{re.escape(layer)}\.\w+", path)
    }
    found = f"{len(sites)}, none of them in this layer of {', '.join(classes)}: its state is not a KV cache"
    return PassError(without[0].name, layer, expected, found)


def _layer(node: Node) -> str | None:
    """Path of the decoder layer that a node was traced from, as in `model.layers.3`."""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        if found := re.match(r"(.*?\.\d+)(\.|$)", str(path)):
            return found[1].removeprefix("model.")
    return None


def ungrouped(node: Node) -> Node:
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


def _prove_window(graph: GraphModule, node: Node, given: Attention, proven: dict[Node, int]) -> int:
    """Return how many tokens a query sees, itself included and the last ones; 0 if it sees all of 0..i. Or refuse.

    A mask is computed from (input_ids, position_ids) for several lengths: a few short ones, two more than every number
    that occurs in its computation, so that a window or a chunk of that size must show, and a long one, beyond the
    product of any two. A number too large for that is replaced by two smaller ones, one after the other: what it does
    to the mask, it does at any size. What goes in steps (quotients, remainders, shifts) is refused.
    """
    queries, keys = tensor_meta(given.q).shape[2], tensor_meta(given.k).shape[2]
    if queries != keys:
        raise fault(node, "as many keys as queries", f"{keys} keys for {queries} queries: a learned prefix?")
    if given.mask is None:
        if not given.is_causal:
            raise fault(node, "causal attention", "attention without a mask: every token sees the later ones")
        return given.window
    if given.is_causal:
        raise fault(node, "a mask or is_causal", "both")
    mask = given.mask
    if mask in proven:
        return proven[mask]
    input_ids, position_ids = (n for n in graph.graph.nodes if n.op == "placeholder")
    numbers = _numbers_of(graph, node, mask)

    def window_at(length: int, offset: int, replaced: float = 0.0, stand_in: float = 0.0) -> int:
        feed = {
            input_ids: torch.zeros(1, length, dtype=torch.int64),
            position_ids: torch.arange(offset, offset + length)[None],
        }
        window = window_of(
            evaluate(
                graph, mask, feed, lambda n: type(n)(math.copysign(stand_in, n)) if abs(n) == replaced != 0.0 else n
            ),
            length,
        )
        if window is None:
            raise fault(
                node,
                "a causal mask or a sliding window",
                f"a mask that is neither at a length of {length} tokens"
                + (f" with {stand_in:g} in place of its number {replaced:g}" if replaced else "")
                + ": a prefix, a block mask or a bias that depends on distance (ALiBi) cannot be served by a "
                "clustered cache, and what is hidden must be false, or below -1e4",
            )
        return window

    *_, second, factor = (1.0, *sorted(numbers.small)) if numbers.scaled else (1.0, 1.0)
    if second * factor > LONGEST_MASK:
        raise fault(node, "a causal mask or a sliding window", f"a mask scaled by {second:g} or {factor:g}")
    beyond = math.ceil(max(LARGEST_MASK, 2 * max(numbers.small), second * factor))
    lengths = {*MASK_LENGTHS, *(math.ceil(number) + 2 for number in numbers.small), min(numbers.longest, beyond + 2)}
    found = {(length, offset): window_at(length, offset) for length in sorted(lengths) for offset in (0, 5)}
    windows = {window for window in found.values() if window}
    for number in sorted(numbers.large):
        inverse = number < 1.0
        seen = [window_at(math.ceil(n * factor) + 8, 0, number, 1 / n if inverse else n) for n in STAND_INS]
        if any(seen):
            excess = {window - n for window, n in zip(seen, STAND_INS, strict=True)}
            if len(excess) > 1 or 0 in seen:
                raise fault(
                    node, "a causal mask or a sliding window", f"a mask that changes with its number {number:g}"
                )
            windows.add(round(1 / number if inverse else number) + excess.pop())
    window = min(windows, default=0)
    for (length, _), seen_window in found.items():
        if seen_window != (window if window < length else 0):
            raise fault(node, "one sliding window", f"one of {seen_window} at a length of {length}")
    proven[mask] = window
    return window


class _Numbers(NamedTuple):
    """What a mask is computed with."""

    small: set[float]  # and 1
    large: set[float]
    scaled: bool  # something is multiplied or divided
    longest: int  # length that its constants serve


def _numbers_of(graph: GraphModule, node: Node, mask: Node) -> _Numbers:
    """Collect the numbers in the computation of the mask of an attention node; refuse what no number would show."""
    found = _Numbers({1.0}, set(), False, LONGEST_MASK + 2)
    input_ids, position_ids = (n for n in graph.graph.nodes if n.op == "placeholder")
    for ancestor in ancestors(mask):
        packet = getattr(ancestor.target, "overloadpacket", None)
        if packet in _STEPS or ancestor.kwargs.get("rounding_mode"):
            raise fault(node, "a causal mask or a sliding window", f"a mask in steps or blocks, by {ancestor.target}")
        if ancestor.op == "placeholder" and ancestor not in (position_ids, input_ids):
            raise fault(node, "a mask made of positions", f"a mask that depends on the input {ancestor.name}")
        if input_ids in ancestor.all_input_nodes and ancestor.target is not _aten.sym_size.int:
            raise fault(node, "a mask made of positions", f"a mask that depends on the token ids, at {ancestor.name}")
        found = found._replace(scaled=found.scaled or packet in _FACTORS)
        shape = tuple(_get_attr(graph, str(ancestor.target)).shape) if ancestor.op == "get_attr" else ()
        if math.prod(shape) > 64:  # a mask, which serves no longer prompt
            found = found._replace(longest=min(found.longest, *(size for size in shape if size > 1)))
        for number in _numbers(graph, ancestor):
            # A reciprocal, as in distance * (1 / window), is the window too.
            for bound in (number, 1 / number if number else 0):
                if 1 < bound < LARGEST_MASK:
                    found.small.add(bound)
                elif LARGEST_MASK <= bound < NO_BOUND and ancestor.op == "get_attr":
                    raise fault(
                        node,
                        "a causal mask or a sliding window",
                        f"a mask made of the constant {ancestor.target} of shape {shape} with {bound:g} in it or for "
                        "its size, too large to look through: pass is_causal=True instead",
                    )
                elif LARGEST_MASK <= bound < NO_BOUND:
                    found.large.add(number)
    return found


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


def window_of(mask: Tensor, length: int) -> int | None:
    """The window of a boolean mask, or an additive one of zeros and very negative numbers; 0 if it is plain causal."""
    if mask.shape[-2:] != (length, length):
        return None
    if mask.dtype != torch.bool:
        hidden = mask <= -1e4
        if not bool((hidden | (mask == 0)).all()):
            return None
        mask = ~hidden
    window = int(mask[..., -1, :].sum(dim=-1).max())
    band = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
    if not bool((mask == band).all()):
        return None
    return window if window < length else 0
