"""Who takes part in a contest, and how the process of each is asked to get ready."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ckv_compile.loading import gguf_of, path_of
from ckv_compile.peers import NOT_INSTALLED, command_of
from ckv_compile.plan import slots_of

DYNAMIC = "dynamic"
STATIC = "static"
KVPRESS = ("kvpress-snapkv", "kvpress-knorm")
LLAMA = "llama.cpp"
OURS = "ours"
INT8 = "ours-int8"
KINDS = (DYNAMIC, STATIC, *KVPRESS, LLAMA, OURS, INT8)
COMPILED = (STATIC, OURS, INT8)
_HERE = (sys.executable, "-m", "ckv_compile.benchmark.worker")


class Contestant(NamedTuple):
    """One row of a table."""

    name: str
    kind: str  # of KINDS
    kept: int | float | None  # the budget as it was asked for; None keeps everything
    command: Sequence[str]  # of its process
    job: dict[str, Any]  # of "prepare", beside what all get: prompt, tokens, threads
    missing: str = ""  # why it cannot run, or nothing


def contestants(
    source: str,
    kind: str,
    context: int,
    batch: int,
    budgets: Sequence[int | float],
    *,
    tokens: int,
    dtype: str,
    device: str,
    compile: str,
    **options: Any,
) -> Iterator[Contestant]:
    """Those of one kind, for one context and batch: of ours one that keeps everything, and one for each budget.

    INT8 are ours with slots of 8 bits.

    `contest.contest` says what the arguments are.
    """
    job: dict[str, Any] = {"model": str(path_of(source)), "dtype": dtype, "device": device}
    if kind in (OURS, INT8):
        name, stored = ("ckv_compile", {}) if kind == OURS else ("ckv_compile, int8", {"cache_dtype": "int8"})
        for kept in (None, *budgets):
            slots = context + tokens if kept is None else slots_of(kept, context)
            own = {"kind": OURS, "compile": compile, "budget": slots, "max_batch_size": batch} | options | stored
            yield Contestant(name, kind, kept, _HERE, job | own)
    elif kind in KVPRESS:
        command, press = command_of("kvpress"), kind.removeprefix("kvpress-")
        for budget in budgets:
            own = {"press": press, "slots": min(context, slots_of(budget, context))}
            missing = "" if command else NOT_INSTALLED
            yield Contestant(f"kvpress, {press}", kind, budget, command or (), job | own, missing)
    elif kind == LLAMA:
        yield from _llama(source, dtype, device)
    else:
        name = f"transformers, {kind} cache{', compiled' if kind == STATIC else ''}"
        yield Contestant(name, kind, None, _HERE, job | {"kind": kind})


def _llama(source: str, dtype: str, device: str) -> Iterator[Contestant]:
    """llama.cpp as its file is shipped, with a float16 cache, and with weights and cache of a dtype."""
    command, gguf = command_of("llama"), gguf_of(source)
    missing = "" if command else NOT_INSTALLED
    if gguf is None:
        missing = "it needs a GGUF file"
    elif device != "cpu":
        missing = "make peers builds it for the CPU"
    for name, own in (("as shipped", None), (dtype, dtype)):
        job = {"gguf": str(gguf), "dtype": own, "converted": f"{path_of(source)}-{dtype}.gguf"}
        yield Contestant(f"{LLAMA}, {name}", LLAMA, None, command or (), job, missing)
