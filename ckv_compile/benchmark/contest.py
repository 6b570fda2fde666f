"""Contestants on the same prompts: each in a process of its own, asked for one run at a time, in turn.

So runs are interleaved, and the memory of each is its own. All contestants of a context and batch are alive at once:
those that wait hold their weights and caches. A peer whose environment is missing, or a contestant that fails, has a
row that says so.

Prompts are random tokens, and contexts may be longer than the model's own, since speed needs no quality.
"""

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from ckv_compile.benchmark.contestants import COMPILED, INT8, KINDS, OURS, Contestant, contestants
from ckv_compile.benchmark.timing import Memory, machine_name
from ckv_compile.config import CKVConfig
from ckv_compile.errors import InputError, PeerError
from ckv_compile.loading import check_original, load_config
from ckv_compile.peers import Worker
from ckv_compile.plan import context_of, slots_of

WARM_UP = 2
"""Steps of a run that are not counted: the first ones after a prefill warm up."""


class Spread(NamedTuple):
    """A median, and what lies around it."""

    median: float
    low: float
    high: float


def contest(
    source: str,
    contexts: Sequence[int],
    batches: Sequence[int],
    budgets: Sequence[int | float],
    *,
    kinds: Sequence[str] = KINDS,
    tokens: int,
    rounds: int,
    dtype: str,
    device: str,
    threads: int | None,
    compile: str,
    progress: Callable[[int, int], None],
    **options: Any,
) -> dict[str, Any]:
    """Run a contest.

    Args:
        source: what `load_model` takes.
        contexts: tokens of the prompts.
        batches: rows of the prompts.
        budgets: slots per KV head, or shares of the context that are kept, of ours and of kvpress. One of ours keeps
            everything.
        kinds: of KINDS.
        tokens: to generate in each run.
        rounds: runs of each contestant.
        dtype: of weights and caches. llama.cpp also runs as its file is shipped.
        device: "cpu" or a CUDA device.
        threads: on the CPU; None is torch's choice.
        compile: of ours, as in `transform`.
        progress: told the starts and runs that are done and how many there are.
        **options: other fields of `CKVConfig`, of ours.

    Returns:
        "machine", what was asked for, and "rows": one for each contestant, context and batch. Seconds of a prefill are
        {"median", "low", "high"} with the range over the rounds, those of a step with the quartiles over all steps.

    Raises:
        InputError: for a number that is too small, or a kind that does not exist.
        ConfigError: for a bad budget or option.
        CKVError: if there is no such model, or for an artifact.
    """
    if tokens < WARM_UP + 2 or rounds < 1:
        raise InputError(
            f"tokens={tokens}, rounds={rounds}: generate at least {WARM_UP + 2} tokens, in 1 round or more"
        )
    for kind in kinds:
        if kind not in KINDS:
            raise InputError(f"contestant {kind!r}: choose among {', '.join(KINDS)}")
    for context in contexts:
        for budget in budgets:
            CKVConfig.from_options({**options, "budget": slots_of(budget, context)})
    check_original(source)
    config = load_config(source)
    threads = threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    ours: dict[str, Any] = {"tokens": tokens, "dtype": dtype, "device": device, "compile": compile} | options
    cells = [(context, batch) for context in contexts for batch in batches]
    rows: list[dict[str, Any]] = []
    done = 0
    with tempfile.TemporaryDirectory(prefix="ckv-bench-") as compiled:
        for context, batch in cells:
            found = [each for kind in kinds for each in contestants(source, kind, context, batch, budgets, **ours)]
            job = {"prompt": _prompt(config, context, batch), "tokens": tokens, "threads": threads}
            memory = Memory(device)
            with contextlib.ExitStack() as stack:
                runners = [_Runner(each, job, Path(compiled)) for each in found]
                total = len(cells) * len(runners) * (1 + rounds)
                for runner in runners:
                    stack.callback(runner.close)
                    runner.start(cold=(context, batch) == cells[0])
                    progress(done := done + 1, total)
                for _ in range(rounds):
                    for runner in runners:
                        memory.sample()
                        runner.run()
                        memory.sample()
                        progress(done := done + 1, total)
            whole = {each.contestant.kind: each.prefills for each in runners if each.contestant.kept is None}
            rows += [
                {"context": context, "batch": batch}
                | runner.row(batch, whole.get(runner.contestant.kind, []), memory.bandwidth())
                for runner in runners
            ]
    return {
        "model": source,
        "machine": {
            "name": machine_name(device),
            "threads": threads,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "date": time.strftime("%Y-%m-%d"),
        },
        "dtype": dtype,
        "device": device,
        "own_context": context_of(config),
        "tokens": tokens,
        "rounds": rounds,
        "rows": rows,
    }


class _Runner:
    """The process of a contestant, and what it has measured.

    Args:
        contestant: who runs.
        job: what all are given.
        compiled: folder of what is compiled in this contest.
    """

    def __init__(self, contestant: Contestant, job: dict[str, Any], compiled: Path) -> None:
        self.contestant = contestant
        self.failed = contestant.missing
        self.prefills: list[float] = []
        self._job = contestant.job | job
        name = f"{contestant.kind}-{contestant.kept}"
        self._environment = {"TORCHINDUCTOR_CACHE_DIR": str(compiled / name)}
        self._process: Worker | None = None
        self._ready: dict[str, Any] = {}
        self._cold: float | None = None
        self._steps: list[float] = []
        self._last: dict[str, Any] = {}

    def start(self, cold: bool) -> None:
        """Get ready to run; if `cold`, twice, so that the second process finds what the first one has compiled."""
        if self.failed:
            return
        try:
            for attempt in range(1 + (cold and self.contestant.kind in COMPILED)):
                if attempt:
                    self._cold = self._ready["compile_s"]
                    self.close()
                self._process = Worker(self.contestant.command, self._environment)
                self._ready = self._process.ask("prepare", **self._job)
        except PeerError as error:
            self.failed = str(error)

    def run(self) -> None:
        """Run once."""
        if self.failed or self._process is None:
            return
        try:
            self._last = self._process.ask("measure")
        except PeerError as error:
            self.failed = str(error)
            return
        self.prefills.append(self._last["prefill_s"])
        self._steps += self._last["steps_s"][WARM_UP:]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def row(self, batch: int, whole: Sequence[float], bandwidth: float) -> dict[str, Any]:
        """What was measured.

        Args:
            batch: rows of the prompt.
            whole: prefills of ours that keeps everything, from which the cost of compression is told.
            bandwidth: bytes per second of the memory.
        """
        row: dict[str, Any] = self.contestant._asdict()
        row = {name: row[name] for name in ("name", "kind", "kept")} | {"failed": self.failed}
        if self.failed:
            return row
        low, median, high = statistics.quantiles(self._steps, n=4)
        compression = None
        if self.contestant.kind in (OURS, INT8) and self.contestant.kept is not None and whole:
            compression = statistics.median(own - full for own, full in zip(self.prefills, whole, strict=False))
        return row | {
            "prefill_s": Spread(statistics.median(self.prefills), min(self.prefills), max(self.prefills))._asdict(),
            "compression_s": compression,
            "step_s": Spread(median, low, high)._asdict(),
            "tokens_per_s": batch / median,
            "floor_s": (self._ready["weights_bytes"] + self._last["cache_bytes"]) / bandwidth,
            "peak_bytes": self._last["peak_bytes"],
            "cache_bytes": self._last["cache_bytes"],
            "weights_bytes": self._ready["weights_bytes"],
            "compile_cold_s": self._cold,
            "compile_warm_s": None if self._cold is None else self._ready["compile_s"],
        }


def _prompt(config: Any, context: int, batch: int) -> list[list[int]]:
    """Random token ids [batch, context], always the same."""
    draw = random.Random(0)
    vocabulary = config.get_text_config(decoder=True).vocab_size
    return [[draw.randrange(vocabulary) for _ in range(context)] for _ in range(batch)]
