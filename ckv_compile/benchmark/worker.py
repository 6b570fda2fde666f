"""A contestant of this environment in a process of its own: python -m ckv_compile.benchmark.worker

It answers the same jobs as the adapters of peers do (see `peers.serving`).
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, CompileConfig

from ckv_compile.benchmark.contestants import DYNAMIC, OURS, STATIC
from ckv_compile.benchmark.timing import Timing, time_generate
from ckv_compile.model import transform
from ckv_compile.peers.serving import peak_bytes, serve
from ckv_compile.roofline import weight_bytes

KINDS = (DYNAMIC, STATIC, OURS)


class Contestant:
    """A model with one kind of cache, and the prompt that it reads."""

    def __init__(self) -> None:
        self.round: Callable[[], Timing] | None = None
        self.cuda = False

    def prepare(
        self,
        kind: str,
        model: str,
        prompt: list[list[int]],
        tokens: int,
        dtype: str,
        device: str,
        threads: int | None,
        compile: str = "inductor",
        **options: Any,
    ) -> dict[str, Any]:
        """Load what `measure` runs, and compile it.

        Args:
            kind: DYNAMIC or STATIC, the caches of transformers, the second one with a compiled step; or OURS.
            model: folder or hub id.
            prompt: token ids [B, S].
            tokens: to generate.
            dtype: of weights and cache.
            device: of both.
            threads: of torch on the CPU; None is its own choice.
            compile: of OURS, as in `transform`.
            **options: of OURS, fields of `CKVConfig`.

        Returns:
            "weights_bytes" that a step reads, and "compile_s", the seconds until a step is compiled, with what comes
            before the compiler; None where nothing is.
        """
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: choose one of {', '.join(KINDS)}")
        transformers.logging.set_verbosity_error()
        if threads is not None:
            torch.set_num_threads(threads)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval().to(device)
        ids = torch.tensor(prompt, device=device)
        self.cuda = ids.is_cuda
        if self.cuda:
            torch.cuda.set_device(ids.device)  # of clocks and peaks
        compile_s = None
        if kind == OURS:
            start = time.perf_counter()
            ours = transform(loaded, compile=compile, **options)
            ours.warm_up(len(prompt))
            compile_s = time.perf_counter() - start
            self.round = lambda: time_generate(ours, ids, tokens)
        elif kind == STATIC:
            config = CompileConfig(fullgraph=True, dynamic=False, mode="default")
            config._compile_all_devices = True  # transformers compiles a static cache on accelerators only, unless told
            self.round = lambda: time_generate(
                loaded, ids, tokens, cache_implementation="static", compile_config=config
            )
            steps = self.round().steps  # compiled for this size of cache, which a shorter prompt would not have
            compile_s = steps[0] - statistics.median(steps[1:])
        else:
            self.round = lambda: time_generate(loaded, ids, tokens)
        with torch.no_grad():
            loaded(ids[:, :8])  # what is set up once at a first use
        peak_bytes(self.cuda, reset=True)
        return {"weights_bytes": weight_bytes(loaded), "compile_s": compile_s}

    def measure(self) -> dict[str, Any]:
        """Run the prompt and its reply once: seconds, bytes of the cache, and the peak since `prepare`."""
        if self.round is None:
            raise ValueError("nothing is prepared: ask for 'prepare' first")
        prefill, steps, held = self.round()
        return {"prefill_s": prefill, "steps_s": steps, "cache_bytes": held, "peak_bytes": peak_bytes(self.cuda)}


if __name__ == "__main__":
    contestant = Contestant()
    serve({"prepare": contestant.prepare, "measure": contestant.measure})
