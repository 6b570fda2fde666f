"""Processes that are asked over a pipe: peers in environments of their own, which `make peers` makes.

`kvpress_adapter.py` and `llama_adapter.py` are scripts that run in those environments, and are never imported.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ckv_compile.errors import PeerError

ROOT = Path(__file__).parents[2]
"""Where the environments are: beside the Makefile of a checkout."""
NOT_INSTALLED = "not installed: make peers"


class Worker:
    """A process that answers jobs, one at a time (see `serving.serve`).

    Args:
        command: of the process.
        environment: variables beside those of this process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=os.environ | (environment or {}),
        )

    def ask(self, do: str, **job: Any) -> dict[str, Any]:
        """Send a job and wait for its result.

        Raises:
            PeerError: if it failed, or the process ended; with the reason.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps({"do": do, **job}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:  # it has ended
            line = ""
        if not line:
            code = self._process.wait()
            raise PeerError(f"{do} ended its process with code {code}: {self._last_line()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{do} failed: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def close(self) -> None:
        """Let the process end, and wait for it."""
        self._process.communicate()
        self._said.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self._process.kill()  # it may be in the middle of a job
        self.close()

    def _last_line(self) -> str:
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def command_of(peer: str) -> list[str] | None:
    """What starts the adapter of "kvpress" or "llama"; None if `make peers` has not made its environment."""
    folder = ROOT / f".venv-{peer}"
    if not (folder / "ready").exists():
        return None
    return [str(folder / "bin" / "python"), str(Path(__file__).with_name(f"{peer}_adapter.py"))]
