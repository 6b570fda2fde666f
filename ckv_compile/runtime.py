"""The generation loop: decode step, sampling and stop check that never make the device wait for the host.

    prefill logits -> sampler -> ids -> [decode program -> sampler -> ids] ... -> tokens

A `DecodeStep` holds what is in brackets on tensors of fixed address. On CUDA it is recorded once as one CUDA graph, of
the program with its guarded compaction and of the sampling, and replayed for every token. Recording is our own rather
than Inductor's, whose cudagraph trees check and may copy the inputs of every call and would leave out the sampling, the
result of which is the input of the next replay.

The host looks at a token only `LAG` steps after it was launched. A row that has ended takes its end-of-sequence token
and is no longer active then (see `CacheState`); once all have ended none is. So no padding enters a cache, and the
steps that are launched before the host knows of the last end change nothing.
"""

import collections
import functools
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessor,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ckv_compile.cache import CacheState, ClusteredCache
from ckv_compile.errors import CompileError
from ckv_compile.pipeline import Program

log = logging.getLogger("ckv_compile")

_recording = threading.Lock()
"""A process may record one CUDA graph at a time."""

LAG = 2
"""Steps that the host runs ahead of the tokens it has seen, on CUDA: one that runs, and one that waits for it."""

_BLOCK = 1024
"""Columns that the loop has room for at first; the room is doubled when it is full."""

_POINTWISE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class Streamer(Protocol):
    """What transformers calls a streamer."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


class Sampler:
    """Chooses the next token of every row on the device, as transformers' `generate` would.

    Temperature, top-k, top-p and min-p are transformers' own processors. The repetition penalty is computed from a
    mask of the tokens a row has seen, since transformers' looks at a sequence that grows. Sampling draws the same
    tokens as `torch.multinomial` from the same generator state, but without its checks, which wait for the device.

    Args:
        processors: transformers' logits processors.
        criteria: transformers' stopping criteria.
        do_sample: sample instead of taking the most likely token.
        pad: token that a row goes on with once it has ended, a tensor; None without end-of-sequence tokens.
        device: where the tokens are.
    """

    def __init__(
        self,
        processors: Iterable[LogitsProcessor],
        criteria: Iterable[StoppingCriteria],
        do_sample: bool,
        pad: Tensor | None,
        device: torch.device,
    ) -> None:
        self.processors = list(processors)
        self.do_sample = do_sample
        ends = [criterion.eos_token_id.to(device) for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
        self.ends: Tensor | None = torch.cat([end.flatten() for end in ends]) if ends else None
        self.pad = None if pad is None else pad.to(device)

    @staticmethod
    def obstacle(processors: Iterable[LogitsProcessor], criteria: Iterable[StoppingCriteria]) -> str | None:
        """Name the first processor or criterion that needs transformers' own loop, or None."""
        for processor in processors:
            # As a tensor it is the padding of each row, which never is longer than the prompt.
            penalizes = type(processor) is RepetitionPenaltyLogitsProcessor and (
                processor.prompt_ignore_length is None or isinstance(processor.prompt_ignore_length, Tensor)
            )
            if not penalizes and type(processor) not in _POINTWISE:
                return type(processor).__name__
        for criterion in criteria:
            if type(criterion) not in (EosTokenCriteria, MaxLengthCriteria):
                return type(criterion).__name__
        return None

    @functools.cached_property
    def key(self) -> tuple[Any, ...]:
        """What two samplers must share to be served by one recorded step."""
        settings = [(type(processor), *sorted(_numbers(processor).items())) for processor in self.processors]
        ends = None if self.ends is None else tuple(self.ends.tolist())
        return (*settings, self.do_sample, ends, None if self.pad is None else int(self.pad))

    @property
    def uses_history(self) -> bool:
        """Whether the choice depends on the tokens that a row has seen."""
        return any(isinstance(processor, RepetitionPenaltyLogitsProcessor) for processor in self.processors)

    def history(self, prompt: Tensor, nothing: int) -> Tensor:
        """The tokens of a prompt [B, S] that count as seen; what transformers ignores, the padding, is `nothing`."""
        for processor in self.processors:
            padding = getattr(processor, "prompt_ignore_length", None)
            if padding is not None:
                columns = torch.arange(prompt.shape[1], device=prompt.device)
                prompt = prompt.masked_fill(columns < padding.to(prompt.device)[:, None], nothing)
        return prompt

    def choose(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """Return the next token [B] for logits [B, 1, vocab] and the mask of seen tokens [B, at least vocab]."""
        scores = logits[:, -1].to(torch.float32, copy=True)
        for processor in self.processors:
            if isinstance(processor, RepetitionPenaltyLogitsProcessor):
                assert seen is not None
                penalty = processor.penalty
                scores = torch.where(
                    seen[:, : scores.shape[1]], torch.where(scores < 0, scores * penalty, scores / penalty), scores
                )
            else:
                scores = processor(None, scores)
        if not self.do_sample:
            return scores.argmax(dim=-1)
        probabilities = scores.softmax(dim=-1)
        return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(dim=-1)


class DecodeStep:
    """One decode step of one cache on tensors of fixed address: `ids` in, the next `tokens` and `ids` out.

    Without a sampler it leaves the `logits` for a loop outside. A recorded step reads the tensors of its own sampler,
    which it therefore keeps.

    Args:
        program: the decode program, which has run before.
        state: the tensors of the cache.
        sampler: chooses the next token inside the step.
        vocabulary: token ids of the model.
        record: record the step as a CUDA graph.

    Raises:
        CompileError: if it cannot be recorded.
    """

    logits: Tensor  # [B, 1, vocab], of the last run

    def __init__(
        self, program: Program, state: CacheState, sampler: Sampler | None, vocabulary: int, record: bool
    ) -> None:
        rows, device = state.fill.shape[0], state.fill.device
        self.state = state
        self.sampler = sampler
        self.ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)  # what the program takes
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)  # what was chosen, padding included
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.seen: Tensor | None = None
        if sampler and sampler.uses_history:  # tokens of each row, and one more column, which takes up the padding
            self.seen = torch.zeros(rows, vocabulary + 1, dtype=torch.bool, device=device)
        self._program = program
        self._replay = self._record() if record else None

    def start(self, history: Tensor, logits: Tensor) -> None:
        """Choose the first token from the logits [B, 1, vocab] that follow a prompt (see `Sampler.history`)."""
        self.state.active.fill_(True)
        self.ended.fill_(False)
        if self.seen is not None:
            self.seen.zero_().scatter_(1, history, True)
        self._choose(logits)

    def run(self) -> None:
        """Advance the cache by `ids`."""
        if self._replay is not None:
            self._replay()
        else:
            self._run()

    def _run(self) -> None:
        self.logits = self._program(self.ids, *self.state)[0]
        if self.sampler is not None:
            self._choose(self.logits)

    def _choose(self, logits: Tensor) -> None:
        assert self.sampler is not None
        chosen = self.sampler.choose(logits, self.seen)
        if self.sampler.ends is not None:
            assert self.sampler.pad is not None
            self.ids.copy_(chosen.masked_fill(self.ended, 0)[:, None])  # a padding token need not be in the vocabulary
            chosen = torch.where(self.ended, self.sampler.pad, chosen)
            self.state.active.copy_(~self.ended)
            # Not torch.isin, which sorts when there are many.
            self.ended.logical_or_((chosen[:, None] == self.sampler.ends).any(dim=1))
            self.state.active.logical_and_(~self.ended.all())
        else:
            self.ids.copy_(chosen[:, None])
        self.tokens.copy_(chosen)
        if self.seen is not None:
            self.seen.scatter_(1, self.ids, True)

    def _record(self) -> Callable[[], None]:
        """Record the step as a CUDA graph, and return its replay."""
        active = self.state.active.clone()
        side = torch.cuda.Stream()
        try:
            # A first run outside: libraries and kernels load at first use. Rows that are not active are left alone.
            self.state.active.fill_(False)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), torch.random.fork_rng([self.ids.device]):
                self._run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with _recording, torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._run()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise CompileError(
                f"the decode step could not be recorded as a CUDA graph ({type(error).__name__}: {error}); "
                'transform(..., compile="inductor-no-cudagraphs") does without'
            ) from error
        finally:
            self.state.active.copy_(active)
        log.info("recorded the decode step of %d rows as a CUDA graph", self.ids.shape[0])
        return graph.replay


def decode_loop(
    step: DecodeStep,
    cache: ClusteredCache,
    prompt: Tensor,
    logits: Tensor,
    sampler: Sampler,
    length: int,
    streamer: Streamer | None = None,
    lag: int | None = None,
) -> Tensor:
    """Generate until every row has ended or has `length` columns.

    Args:
        step: a step of this cache, with a sampler.
        cache: holds the prompt; its columns and rows are advanced.
        prompt: [B, S] tokens, padding included.
        logits: [B, 1, vocab] after the prompt.
        sampler: of this call; its key is that of the step's own.
        length: columns of the result, at most; there is one more than the prompt's at least, as in transformers.
        streamer: gets the tokens [B] of each column, on the CPU.
        lag: steps to launch ahead of the tokens that the host has looked at; None is `LAG` on CUDA, and 0 on the CPU.

    Returns:
        [B, columns] int64: the prompt and what follows, a row that has ended continued with padding.
    """
    prompt = prompt.to(torch.int64)
    width, count = prompt.shape[1], 0
    tokens = prompt.new_empty(prompt.shape[0], _BLOCK)
    watch = _Watch(step, streamer, LAG * prompt.is_cuda if lag is None else lag)
    step.start(sampler.history(prompt, step.seen.shape[1] - 1) if step.seen is not None else prompt, logits)
    while True:
        if count == tokens.shape[1]:
            tokens = torch.cat([tokens, torch.empty_like(tokens)], dim=1)
        tokens[:, count] = step.tokens
        count += 1
        end = watch.look(count)
        if end is not None or width + count >= length:
            break
        cache.broken = True
        step.run()
        cache.columns += 1
        cache.broken = False
    end = watch.finish() if end is None else end
    if end is not None:  # what comes after it was chosen by steps that changed nothing
        cache.columns -= count - end
        count = end
    return torch.cat([prompt, tokens[:, :count]], dim=1)


class _Watch:
    """Looks at the tokens of each column some steps after they were launched, so that nobody waits."""

    def __init__(self, step: DecodeStep, streamer: Streamer | None, lag: int) -> None:
        self.step = step
        self.streamer = streamer
        self.can_end = step.sampler is not None and step.sampler.ends is not None
        self.on_cuda = step.ids.is_cuda
        self.lag = lag
        self.pending: collections.deque[tuple[int, Tensor, Tensor, Any]] = collections.deque()

    def look(self, columns: int) -> int | None:
        """Note that the last of `columns` of tokens is on its way; return the number at which all rows had ended."""
        if not self.can_end and self.streamer is None:
            return None
        event = torch.cuda.Event() if self.on_cuda else None
        tokens, ended = self._on_its_way(self.step.tokens), self._on_its_way(self.step.ended)
        if event is not None:
            event.record()
        self.pending.append((columns, tokens, ended, event))
        return self._drain(self.lag)

    def finish(self) -> int | None:
        """Look at the tokens still on their way."""
        return self._drain(0)

    def _on_its_way(self, tensor: Tensor) -> Tensor:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.on_cuda)
        return copy.copy_(tensor, non_blocking=True)

    def _drain(self, left: int) -> int | None:
        while len(self.pending) > left:
            columns, tokens, ended, event = self.pending.popleft()
            if event is not None:
                event.synchronize()
            if self.streamer is not None:
                self.streamer.put(tokens)
            if self.can_end and ended.all():
                self.pending.clear()
                return columns
        return None


def _numbers(processor: LogitsProcessor) -> dict[str, Any]:
    """The settings of a processor."""
    return {name: value for name, value in vars(processor).items() if isinstance(value, int | float)}
