"""llama.cpp, asked over a pipe: run by its path in the environment that `make peers` makes, never imported.

It is measured as it is shipped, with the weights of a GGUF file (of 4 bits, for instance) and a float16 cache; and with
weights and cache of a dtype, converted by llama.cpp itself, which is what the other contestants hold.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving import Clock, peak_bytes, serve

# dtype -> (llama_ftype of the weights, ggml_type of the cache, bytes of an element of the cache)
DTYPES = {"float32": (0, 0, 4), "float16": (1, 1, 2), "bfloat16": (32, 30, 2)}
SHIPPED = (1, 2)  # ggml_type of the cache, and bytes
BATCH = 512  # tokens of a prompt that llama.cpp is given at once, its own default


class Adapter:
    """A context of llama.cpp, and the prompt that it reads."""

    def __init__(self) -> None:
        self.round: Callable[[], dict[str, Any]] | None = None

    def prepare(
        self,
        gguf: str,
        prompt: list[list[int]],
        tokens: int,
        dtype: str | None,
        converted: str,
        threads: int | None,
    ) -> dict[str, Any]:
        """Load what `measure` runs.

        Args:
            gguf: path of a file.
            prompt: token ids [B, S].
            tokens: to generate.
            dtype: of weights and cache; None takes the weights as they are, and a float16 cache.
            converted: where a copy of the file with such weights is kept.
            threads: on the CPU; None is one for each core.

        Returns:
            "weights_bytes" that a step reads, and "compile_s", None since nothing is compiled.
        """
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
        if dtype is not None:
            _convert(gguf, dtype, converted)
            gguf = converted

        import llama_cpp
        import numpy as np

        rows, length = len(prompt), len(prompt[0])
        kind, size = SHIPPED if dtype is None else DTYPES[dtype][1:]
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model = llama_cpp.llama_model_load_from_file(gguf.encode(), model_params)
        if not model:
            raise ValueError(f"llama.cpp cannot load {gguf}")
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max, params.n_batch, params.n_ubatch = rows, BATCH, BATCH
        params.n_ctx = rows * (length + tokens)
        params.n_threads = params.n_threads_batch = threads or os.cpu_count() or 1
        params.type_k = params.type_v = kind
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise ValueError(f"llama.cpp has no context of {rows} x {length + tokens} tokens with a cache of {dtype}")
        vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

        def read(entries: list[tuple[int, int, int, bool]]) -> None:
            """Read tokens, with their positions, rows, and whether their logits are wanted."""
            batch.n_tokens = len(entries)
            for i, (token, position, row, wanted) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
                batch.seq_id[i][0] = row
            if code := llama_cpp.llama_decode(context, batch):
                raise ValueError(f"llama.cpp cannot read {len(entries)} tokens at {entries[0][1]} (code {code})")

        def best(i: int) -> int:
            logits = llama_cpp.llama_get_logits_ith(context, i)
            return int(np.ctypeslib.as_array(logits, (vocabulary,)).argmax())

        def run() -> dict[str, Any]:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
            clock, new = Clock(cuda=False), []
            clock.mark()
            for row, ids in enumerate(prompt):
                for start in range(0, length, BATCH):
                    chunk = ids[start : start + BATCH]
                    last = length - 1 - start
                    read([(token, start + i, row, i == last) for i, token in enumerate(chunk)])
                new.append(best(-1))
            clock.mark()
            for step in range(tokens - 1):
                read([(token, length + step, row, True) for row, token in enumerate(new)])
                new = [best(row) for row in range(rows)]
                clock.mark()
            prefill, *steps = clock.seconds()
            return {"prefill_s": prefill, "steps_s": steps, "cache_bytes": held, "peak_bytes": peak_bytes(cuda=False)}

        heads = llama_cpp.llama_model_n_head_kv(model)
        width = llama_cpp.llama_model_n_embd(model) // llama_cpp.llama_model_n_head(model)
        layers = llama_cpp.llama_model_n_layer(model)
        held = llama_cpp.llama_n_ctx(context) * layers * 2 * heads * width * size
        self.round = run
        read([(prompt[0][0], 0, 0, True)])
        peak_bytes(cuda=False, reset=True)
        return {"weights_bytes": llama_cpp.llama_model_size(model), "compile_s": None}

    def measure(self) -> dict[str, Any]:
        """Run the prompt and its reply once: seconds, bytes of the cache, and the peak since `prepare`."""
        if self.round is None:
            raise ValueError("nothing is prepared: ask for 'prepare' first")
        return self.round()


def _convert(gguf: str, dtype: str, target: str) -> None:
    """Write a copy of a GGUF file whose weights have a dtype; one that is there is taken as it is."""
    import llama_cpp

    if Path(target).is_file():
        return
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = DTYPES[dtype][0], True
    scratch = f"{target}.{os.getpid()}"
    if llama_cpp.llama_model_quantize(gguf.encode(), scratch.encode(), params):
        raise ValueError(f"llama.cpp cannot convert {gguf} to {dtype}")
    Path(scratch).rename(target)


if __name__ == "__main__":
    adapter = Adapter()
    serve({"prepare": adapter.prepare, "measure": adapter.measure})
