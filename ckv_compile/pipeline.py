"""The ordered list of passes, and the programs that come out of it.

    model -> capture -> freeze_rotary -> canonicalize_attention -> insert_cached_attention -> slice_logits
          -> insert_compaction
          = the rewritten graph, which runs prefill
          -> re-export at the shapes of one step -> reduce_linear -> torch.compile = the decode program

Set `CKV_DUMP=<folder>` to have the graph written before and after every pass.
"""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from transformers import DynamicCache, PreTrainedModel

from ckv_compile.cache import CacheShape, CacheState
from ckv_compile.capture import Logits, capture, device_of, reexport
from ckv_compile.config import CKVConfig
from ckv_compile.errors import ConfigError, PassError, UnsupportedModelError
from ckv_compile.graph import table_limits
from ckv_compile.ops import check_kernels
from ckv_compile.passes.canonicalize_attention import canonicalize_attention
from ckv_compile.passes.freeze_rotary import freeze_rotary
from ckv_compile.passes.insert_cached_attention import cache_shape, insert_cached_attention
from ckv_compile.passes.insert_compaction import insert_compaction
from ckv_compile.passes.reduce_linear import reduce_linear
from ckv_compile.passes.slice_logits import slice_logits
from ckv_compile.schedule import Plans

log = logging.getLogger("ckv_compile")

CompileMode = Literal["inductor", "inductor-no-cudagraphs", "eager"]
_CHECK_PROMPT, _CHECK_STEPS = 8, 4

Pass = Callable[[GraphModule], int]


class PassResult(NamedTuple):
    """What one pass did: its name, the sites it rewrote, and the seconds it took."""

    name: str
    matches: int
    seconds: float


class Program(Protocol):
    """A prefill or decode program: advances the state in place and returns the logits of the last token."""

    def __call__(self, input_ids: Tensor, *state: Tensor) -> tuple[Tensor]: ...


class Rewritten(NamedTuple):
    """A model after the passes: a graph of (input_ids [B, S], *state) -> (logits [B, 1, vocab],), B and S dynamic.

    The graph runs prefill as it is: at those lengths the libraries' matrix products and attention take nearly all the
    time on the CPU, and compiling the rest is not worth its seconds.
    """

    graph: GraphModule
    shape: CacheShape
    plans: Plans
    vocabulary: int  # token ids that it takes
    positions: int | None  # positions that it has learned, if they end
    passes: tuple[PassResult, ...]
    steps: Mapping[int, GraphModule] = MappingProxyType({})  # decode steps that are traced already, by their rows


def rewrite(model: nn.Module, config: CKVConfig) -> Rewritten:
    """Capture a causal LM and run the passes that put a clustered cache under its attention.

    Args:
        model: left unchanged; the graph shares its parameters.
        config: resolved, with an int budget.

    Raises:
        UnsupportedModelError: if the model cannot be traced, a pass refuses its graph (`PassError`), or the rewritten
            graph does not compute what the model does.
    """
    graph = capture(model)
    vocabulary, positions = table_limits(graph)
    positions = min(filter(None, (positions, graph.meta["longest"])), default=None)
    positioned = any(node.users for node in graph.graph.nodes if node.name == "position_ids")
    layers, context = None, config.max_context
    if isinstance(model, PreTrainedModel):
        text_config = model.config.get_text_config(decoder=True)
        layers = text_config.num_hidden_layers
        own_context = getattr(text_config, "max_position_embeddings", None) or 0  # -1 where there is no end
        context = max(context or 0, own_context, 0) or None
    results = run_passes(
        graph,
        [
            functools.partial(freeze_rotary, context=config.max_context),
            functools.partial(canonicalize_attention, layers=layers, context=context),
        ],
    )
    with _as_pass("insert_cached_attention", results):
        shape = cache_shape(graph, config.light_layers)._replace(int8=config.cache_dtype == "int8")
        plans = config.plans(shape.clustered)
    device = device_of(model)
    tokens = min(_CHECK_PROMPT + _CHECK_STEPS, *(plan.capacity - 1 for plan in plans if plan.capacity))  # no compaction
    ids = torch.arange(tokens, device=device)[None] * 7 % vocabulary
    positions_of_ids = torch.arange(tokens, device=device)[None]
    with torch.no_grad():
        # Where the longest context chose the frequencies, the model must have it to choose alike.
        last = positions_of_ids + (max(0, (config.max_context or 0) - tokens) if results[0].matches else 0)
        try:
            own = Logits(model, compiled=False)(ids, last)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} itself fails on a prompt of {tokens} tokens ({type(error).__name__}: {error})"
            ) from error
        difference = _difference(graph(ids, last)[0], own, shape)
        expected = graph(ids, positions_of_ids)[0]
    if difference:
        raise UnsupportedModelError(
            f"the captured graph does not compute what {type(model).__name__} does ({difference}): if the model has an "
            'attention function of your own, which the capture replaces, call set_attn_implementation("sdpa") first'
        )
    if isinstance(model, PreTrainedModel):
        _check_own_windows(model, shape, context)
    if shape.window > config.schedule.budget:
        log.warning(
            "%d sliding-window layers keep all %d tokens of their window, more than budget=%d: windows stay exact",
            shape.window_layers,
            shape.window,
            config.budget,
        )
    check_kernels(shape, config.schedule)
    results += run_passes(
        graph,
        [
            functools.partial(insert_cached_attention, plans=plans, light_layers=config.light_layers),
            slice_logits,
            functools.partial(insert_compaction, plans=plans),
        ],
        before=results,
    )
    _check_equivalence(graph, shape, plans, ids, expected, positioned)
    return Rewritten(graph, shape, plans, vocabulary, positions, results)


def _check_own_windows(model: PreTrainedModel, shape: CacheShape, context: int | None) -> None:
    """Refuse a model whose own cache forgets tokens that its masks let it see: its text depends on the cache then."""
    layers = DynamicCache(config=model.config).layers
    windows = [layer.sliding_window for layer in layers if getattr(layer, "is_sliding", False)]
    if not shape.window_layers and any(context is None or window < context for window in windows):
        raise UnsupportedModelError(
            f"{type(model).__name__} has a sliding window of {windows[0]} tokens in its config, but none in its masks: "
            "with transformers' own cache it forgets what it sees without; set config.sliding_window to the longest "
            "context"
        )


def _check_equivalence(
    graph: GraphModule, shape: CacheShape, plans: Plans, ids: Tensor, expected: Tensor, positioned: bool
) -> None:
    """Compare a short prefill and a few decode steps of the rewritten graph with the captured one's logits.

    Passes look at attention only. A model with another path between tokens (a convolution, a recurrent state, positions
    of its own) has no state to decode with, and shows here.
    """
    state = CacheState.planned(shape._replace(int8=False), plans, 1)  # rounding would be what differs
    prompt = max(1, ids.shape[1] - _CHECK_STEPS)
    with torch.no_grad():
        logits = [graph(ids[:, :prompt], *state)[0]]
        for token in ids[:, prompt:].split(1, dim=1):
            logits.append(graph(token, *state)[0])
    difference = _difference(torch.cat(logits, dim=1), expected[:, prompt - 1 :], shape)
    if difference:
        cause = (
            "tokens of this model see each other by another way than attention over position_ids, such as a convolution"
        )
        if not positioned:
            cause = "this model does not read position_ids: its positions are counted from its own cache"
        raise UnsupportedModelError(
            f"the rewritten graph does not decode what the model computes ({difference}): {cause}"
        )


def _difference(found: Tensor, expected: Tensor, shape: CacheShape) -> str:
    """Say how much logits differ, if that is more than rounding."""
    error = float((found - expected).abs().max() / expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny))
    # A few units of the last place for every layer; what this looks for is of the size of the logits.
    tolerance = 4 * (shape.clustered + shape.window_layers) * torch.finfo(shape.dtype).eps + 1e-3
    return "" if error < tolerance else f"logits differ by {error:.1%}"


def decode_graph(rewritten: Rewritten, state: CacheState) -> GraphModule:
    """Trace the decode step of the rows of a cache, in which every shape is static, and run the passes for it.

    Args:
        rewritten: the model after the passes.
        state: a cache of as many rows; it is looked at, not changed.
    """
    rows = state.fill.shape[0]
    if rows in rewritten.steps:
        return rewritten.steps[rows]
    ids = torch.zeros(rows, 1, dtype=torch.int64, device=rewritten.shape.device)
    graph = reexport(rewritten.graph, ids, state)
    if rewritten.shape.device.type == "cpu":
        run_passes(graph, [reduce_linear], before=rewritten.passes)
    return graph


def decode_program(rewritten: Rewritten, state: CacheState) -> Program:
    """Compile the decode step of the rows of a cache: one program in which every shape is static.

    It has no guards: its arguments always have the dtypes and shapes of the cache that the caller checked, its weights
    are its own, and one guard per weight would be evaluated at every step.

    Args:
        rewritten: the model after the passes.
        state: a cache of as many rows; it is looked at, not changed.
    """
    graph = decode_graph(rewritten, state)
    # Its forward, not the module: the call of a GraphModule hides errors of an op behind its own handling of them.
    return torch.compile(graph.forward, fullgraph=True, dynamic=False, options={"guard_filter_fn": _no_guards})


def run_passes(graph: GraphModule, passes: list[Pass], before: tuple[PassResult, ...] = ()) -> tuple[PassResult, ...]:
    """Run passes in order, each timed, logged in one line, linted, and dumped if `CKV_DUMP` names a folder.

    Raises:
        PassError: from a pass, completed with its name and the passes that had already run.
    """
    results: list[PassResult] = []
    for pass_ in passes:
        name = pass_.func.__name__ if isinstance(pass_, functools.partial) else getattr(pass_, "__name__", repr(pass_))
        _dump(graph, len(before) + len(results), name, "before")
        start = time.perf_counter()
        with _as_pass(name, (*before, *results)):
            matches = pass_(graph)
        graph.graph.lint()
        graph.recompile()
        results.append(PassResult(name, matches, time.perf_counter() - start))
        _dump(graph, len(before) + len(results) - 1, name, "after")
        log.info("%s: %d sites, %.2f s", name, matches, results[-1].seconds)
    return tuple(results)


@contextlib.contextmanager
def _as_pass(name: str, before: Sequence[PassResult]) -> Iterator[None]:
    """Complete an error with the name of the pass it belongs to and of those that had already run."""
    try:
        yield
    except PassError as error:
        error.failed_pass = name
        error.passes_run = tuple(result.name for result in before)
        raise


def check_mode(mode: str) -> CompileMode:
    """Return `mode` if there is such a compile mode.

    Raises:
        ConfigError: otherwise.
    """
    for known in get_args(CompileMode):
        if mode == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"compile={mode!r}: choose one of {', '.join(map(repr, get_args(CompileMode)))}")


def _no_guards(guards: Sequence[object]) -> list[bool]:
    return [False] * len(guards)


def _dump(graph: GraphModule, index: int, name: str, when: str) -> None:
    if folder := os.environ.get("CKV_DUMP"):
        path = Path(folder) / f"{index}_{name}.{when}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(graph.print_readable(print_output=False))
