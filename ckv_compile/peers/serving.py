"""What runs in a process that is measured: it answers jobs over a pipe, and reads clocks and memory.

A job is one line of JSON, an answer another one. The adapters of peers, which run in environments that have nothing of
this package, import this file by its place beside them: it needs the standard library alone.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def serve(jobs: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer the jobs on stdin until it ends.

    A job {"do": name, ...} calls a function of that name with its other fields. Its answer is {"result": ...}, or
    {"error": "..."} if the function raises. What libraries print goes to stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"result": _call(jobs, json.loads(line))}
        except Exception as error:  # the one who asked says it to the user
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _call(jobs: Mapping[str, Callable[..., dict[str, Any]]], job: dict[str, Any]) -> dict[str, Any]:
    name = job.pop("do", None)
    if name not in jobs:
        raise ValueError(f"do={name!r}: choose one of {', '.join(jobs)}")
    return jobs[name](**job)


class Clock:
    """Times between marks, by the events of a CUDA device or by the host's clock."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Note the time."""
        if self.cuda:
            import torch

            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds from mark to mark."""
        pairs = itertools.pairwise(self.marks)
        if self.cuda:
            self.marks[-1].synchronize()
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]


def peak_bytes(cuda: bool, reset: bool = False) -> int | None:
    """Most bytes held since the last reset: allocated on a CUDA device, else by this process; None if unknown.

    The peak of a process is read, and reset, as Linux tells it.
    """
    if cuda:
        import torch

        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    if sys.platform != "linux":
        return None
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
