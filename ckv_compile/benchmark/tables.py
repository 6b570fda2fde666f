"""Time per token, prefill and cache size beside transformers' own caches: python -m ckv_compile.benchmark

All methods run in one process on the same prompt, in turn, for several rounds; times are medians over the tokens of
all rounds. The floor of a step is (weight bytes + cache bytes) / (bandwidth measured in the same run).
"""

import copy
import dataclasses
import importlib.util
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import transformers
from tabulate import tabulate
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig, PreTrainedConfig, PreTrainedModel

from ckv_compile.benchmark.timing import Memory, Timing, machine_name, time_generate
from ckv_compile.cache import cache_of
from ckv_compile.evaluation import evaluate, text_of
from ckv_compile.loading import SMOLLM2, load_model
from ckv_compile.model import CKVForCausalLM, transform
from ckv_compile.ops import cached_attention
from ckv_compile.peers.serving import peak_bytes
from ckv_compile.roofline import GPUS, floors, largest_batch, llama_8b, shape_of, weight_bytes

TABLES = ("speed", "flatness", "memory", "quality")
FLAT_CONTEXTS = (2048, 8192, 32768)
FLAT_LAYERS = 6
CHUNK = 1024
QUALITY_BUDGETS = (0.5, 0.25, 0.125)
QUALITY_TOKENS = 256
MEMORY_COLUMNS = (("whole_mb", 0), ("whole_s", 1), ("chunked_mb", 0), ("chunked_s", 1))
LLAMA_8B = "llama-3.1-8b"
ROOFLINE_KEPT = (0.5, 0.25)


def compare(source: str, dtype: torch.dtype, context: int, budget: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Time transformers' caches and ours on one model, in turn."""
    model, tokenizer = load_model(source, dtype)
    prompt = text_of(tokenizer, context)
    compiled = CompileConfig(fullgraph=True, dynamic=False, mode="default")
    compiled._compile_all_devices = True  # transformers compiles a static cache on accelerators only, unless told
    ours = transform(model, budget=budget)
    start = time.perf_counter()
    ours.warm_up()
    warm_up_seconds = time.perf_counter() - start
    half = transform(model, budget=context // 2)
    half.warm_up()
    methods: dict[str, Callable[[int], Timing]] = {
        "transformers, dynamic cache": lambda n: time_generate(model, prompt, n),
        "transformers, static cache": lambda n: time_generate(
            model, prompt, n, cache_implementation="static", disable_compile=True
        ),
        "transformers, static cache, compiled": lambda n: time_generate(
            model, prompt, n, cache_implementation="static", compile_config=compiled
        ),
        f"ckv_compile, {context // 2} slots": lambda n: time_generate(half, prompt, n),
        f"ckv_compile, {budget} slots": lambda n: time_generate(ours, prompt, n),
    }
    weights = dict.fromkeys(methods, weight_bytes(model))
    if importlib.util.find_spec("torchao"):
        int8 = _int8(model)
        small = transform(int8, budget=budget)
        small.warm_up()
        name = f"ckv_compile, {budget} slots, int8 weights"
        methods[name] = lambda n: time_generate(small, prompt, n)
        weights[name] = weight_bytes(int8)
    memory = Memory()
    rows = []
    timings: dict[str, list[Timing]] = {name: [] for name in methods}
    for round_ in range(rounds):
        for name, run in methods.items():
            memory.sample()
            timings[name].append(run(tokens))
            memory.sample()
            _progress(f"{dtype} round {round_ + 1}/{rounds}: {name}")
    bare, attention = _step_alone(ours, prompt, memory)
    speed = memory.bandwidth()
    for name, runs in timings.items():
        steps = _settled(runs)
        cache = runs[0].cache_bytes
        rows.append(
            {
                "method": name,
                "prefill_s": statistics.median(run.prefill for run in runs),
                "ms_per_token": 1e3 * statistics.median(steps),
                "p90_ms": 1e3 * statistics.quantiles(steps, n=10)[-1],
                "cache_mb": cache / 1e6,
                "floor_ms": 1e3 * (weights[name] + cache) / speed,
            }
        )
    return {
        "dtype": str(dtype),
        "context": context,
        "tokens": tokens,
        "rounds": rounds,
        "bandwidth_gb_s": speed / 1e9,
        "weights_mb": weight_bytes(model) / 1e6,
        "warm_up_s": warm_up_seconds,
        "bare_method": f"ckv_compile, {budget} slots",
        "bare_step_ms": 1e3 * bare,
        "attention_ms": 1e3 * attention,
        "rows": rows,
    }


def _int8(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model whose linear layers, the head among them, hold int8 weights and a scale per row."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantised = copy.deepcopy(model)
    quantize_(quantised, Int8WeightOnlyConfig(set_inductor_config=False))
    return quantised


def flatness(source: str, budget: int, tokens: int, rounds: int) -> list[dict[str, float]]:
    """Time per token against context at one budget: random weights in the model's shape, with fewer layers."""
    config = load_model(source)[0].config
    config.num_hidden_layers = FLAT_LAYERS
    config.max_position_embeddings = max(FLAT_CONTEXTS) + tokens
    model = AutoModelForCausalLM.from_config(config).eval()
    ours = transform(model, budget=budget)
    ours.warm_up()
    timings: dict[int, list[Timing]] = {context: [] for context in FLAT_CONTEXTS}
    for _ in range(rounds):
        for context, runs in timings.items():
            runs.append(time_generate(ours, torch.randint(0, config.vocab_size, (1, context)), tokens))
            _progress(f"flatness: {context} tokens of context")
    rows = []
    for context, runs in timings.items():
        steps = sorted(_settled(runs))
        tenth = len(steps) // 10
        spread = {"p10_ms": 1e3 * steps[tenth], "p90_ms": 1e3 * steps[-1 - tenth]}
        rows.append({"context": context, "ms_per_token": 1e3 * statistics.median(steps), **spread})
    return rows


def prefill_memory(source: str, budget: int) -> list[dict[str, float]]:
    """Peak memory of a prefill above that at rest, and its time, at once and in chunks: the model of `flatness`."""
    config = load_model(source)[0].config
    config.num_hidden_layers = FLAT_LAYERS
    config.max_position_embeddings = max(FLAT_CONTEXTS)
    rows = []
    for context in FLAT_CONTEXTS:
        row: dict[str, float] = {"context": context}
        for name, chunk in (("whole", None), ("chunked", CHUNK)):
            # In a process of its own: what a run before it has freed may not have left the process.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                seconds, peak = pool.apply(_measure_prefill, (config, budget, chunk, context, torch.get_num_threads()))
            row |= {f"{name}_s": seconds, f"{name}_mb": peak / 1e6}
        rows.append(row)
        _progress(f"prefill memory: {context} tokens")
    return rows


def _measure_prefill(
    config: PreTrainedConfig, budget: int, chunk: int | None, context: int, threads: int
) -> tuple[float, int]:
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_config(config).eval()
    ours = transform(model, budget=budget, prefill_chunk=chunk, compile="eager")
    prompt = torch.randint(0, config.vocab_size, (1, context))
    ours(prompt[:, :64])
    start, rest = time.perf_counter(), peak_bytes(cuda=False, reset=True) or 0
    ours(prompt)
    return time.perf_counter() - start, (peak_bytes(cuda=False) or 0) - rest


def quality(source: str, context: int) -> list[dict[str, float]]:
    """What the compressed prompt costs: the next real tokens of the text, at several budgets (see `evaluation.py`)."""
    model, tokenizer = load_model(source)
    kept = (1.0, *QUALITY_BUDGETS)
    rows = []
    found = evaluate(model, text_of(tokenizer, context), [int(share * context) for share in kept], QUALITY_TOKENS)
    for share, result in zip(kept, found, strict=True):
        rows.append({"kept": share, **result._asdict()})
        _progress(f"quality: {share:.1%} of {context} tokens kept")
    return rows


def _step_alone(model: CKVForCausalLM, prompt: Tensor, memory: Memory) -> tuple[float, float]:
    """Median seconds of a decode step without transformers' loop, and of its clustered attention alone."""
    shape, plan = model.cache_shape, dataclasses.asdict(model.ckv_config.schedule)
    output = model(prompt)
    cache = cache_of(output)
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    q = torch.randn(1, heads, 1, shape.head_dim, dtype=shape.dtype)
    k = q[:, : shape.kv_heads]
    steps, attentions = [], []
    for _ in range(50):
        start = time.perf_counter()
        model(prompt[:, :1], past_key_values=cache)
        steps.append(time.perf_counter() - start)
        memory.sample()  # which also drives the cache out of the processor's own
        start = time.perf_counter()
        for layer in range(shape.layers):
            cached_attention(q, k, k, *cache.state[:8], layer, 1.0, None, 0.0, **plan)
        attentions.append(time.perf_counter() - start)
    return statistics.median(steps), statistics.median(attentions)


def _settled(runs: Iterable[Timing]) -> list[float]:
    """The step times of all runs without each run's first two, which compile or warm up."""
    return [step for run in runs for step in run.steps[2:]]


def _progress(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", file=sys.stderr, flush=True)


def roofline(source: str, gpus: Sequence[str], contexts: Sequence[int], batches: Sequence[int]) -> list[dict[str, Any]]:
    """The least time of a decode step in bfloat16 on each GPU: full cache against clustered (see `roofline.py`)."""
    config = llama_8b() if source == LLAMA_8B else AutoConfig.from_pretrained(source)
    shape = shape_of(config)
    rows = []
    for name in gpus:
        for floor in floors(GPUS[name], shape, contexts, ROOFLINE_KEPT, batches):
            rows.append(
                {
                    "gpu": name,
                    **floor._asdict(),
                    "speedup": floor.speedup,
                    "full_batch": largest_batch(GPUS[name], shape, floor.context),
                    "clustered_batch": largest_batch(GPUS[name], shape, floor.context, floor.kept),
                }
            )
    return rows


def report(result: dict[str, Any]) -> str:
    """The result as text: one table a dtype, and the flatness table."""
    parts = [", ".join(f"{name} {value}" for name, value in result["machine"].items())]
    for run in result["runs"]:
        base = {row["method"]: row["ms_per_token"] for row in run["rows"]}
        dynamic, compiled = base["transformers, dynamic cache"], base["transformers, static cache, compiled"]
        table = [
            [
                row["method"],
                f"{row['prefill_s']:.1f}",
                f"{row['ms_per_token']:.1f}",
                f"{row['p90_ms']:.1f}",
                f"{dynamic / row['ms_per_token']:.1f}x",
                f"{compiled / row['ms_per_token']:.1f}x",
                f"{row['cache_mb']:.0f}",
                f"{row['floor_ms']:.1f}",
                f"{row['ms_per_token'] / row['floor_ms']:.2f}",
            ]
            for row in run["rows"]
        ]
        heads = ["method", "prefill s", "ms/token", "p90", "vs dynamic", "vs compiled static", "cache MB", "floor ms"]
        parts.append(
            f"{run['dtype']}, {run['context']} tokens of context, {run['tokens']} tokens x {run['rounds']} rounds, "
            f"{run['bandwidth_gb_s']:.1f} GB/s, weights {run['weights_mb']:.0f} MB, "
            f"warm-up {run['warm_up_s']:.0f} s; a step of {run['bare_method']} outside generate() takes "
            f"{run['bare_step_ms']:.1f} ms, of which attention {run['attention_ms']:.1f} ms"
        )
        parts.append(tabulate(table, headers=[*heads, "x floor"], tablefmt="github", disable_numparse=True))
    if result.get("flatness"):
        rows = [
            [row["context"], *(f"{row[name]:.2f}" for name in ("ms_per_token", "p10_ms", "p90_ms"))]
            for row in result["flatness"]
        ]
        parts.append(f"time per token against context at one budget, {FLAT_LAYERS} layers, random weights")
        parts.append(
            tabulate(rows, headers=["context", "ms/token", "p10", "p90"], tablefmt="github", disable_numparse=True)
        )
    if result.get("memory"):
        rows = [
            [row["context"], *(f"{row[name]:.{digits}f}" for name, digits in MEMORY_COLUMNS)]
            for row in result["memory"]
        ]
        parts.append(f"peak memory of a prefill above that at rest, {FLAT_LAYERS} layers, random weights, float32")
        heads = ["context", "at once: MB", "s", f"in chunks of {CHUNK}: MB", "s"]
        parts.append(tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True))
    if result.get("roofline"):
        rows = [
            [
                row["gpu"],
                row["context"],
                row["batch"],
                f"{row['kept']:.0%}",
                f"{row['full_bytes'] / 1e9:.1f}" if row["full_fits"] else "-",
                f"{1e3 * row['full_seconds']:.2f}" if row["full_fits"] else "-",
                f"{row['clustered_bytes'] / 1e9:.1f}" if row["clustered_fits"] else "-",
                f"{1e3 * row['clustered_seconds']:.2f}" if row["clustered_fits"] else "-",
                f"{row['speedup']:.2f}x" if row["full_fits"] else "-",
                row["full_batch"],
                row["clustered_batch"],
            ]
            for row in result["roofline"]
        ]
        parts.append(
            f"the floor of a decode step of {result['machine']['model']} in bfloat16, by data sheets, nothing measured "
            "(- does not fit in memory; most rows: weights and caches only)"
        )
        heads = ["GPU", "context", "rows", "kept", "full GB", "full ms", "clustered GB", "clustered ms", "at most"]
        parts.append(
            tabulate(rows, headers=[*heads, "most rows, full", "clustered"], tablefmt="github", disable_numparse=True)
        )
    if result.get("quality"):
        rows = [
            [f"{row['kept']:.1%}", f"{row['perplexity']:.2f}", f"{row['kl']:.3f}", f"{row['agreement']:.1%}"]
            for row in result["quality"]
        ]
        parts.append(f"the next {QUALITY_TOKENS} tokens of the text after a compressed prompt, float32")
        heads = ["slots kept", "perplexity", "KL to the full cache", "same first token"]
        parts.append(tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True))
    return "\n\n".join(parts)


def run(
    model: str | None = None,
    context: int = 8000,
    budget: int = 2048,
    tokens: int = 64,
    rounds: int = 3,
    threads: int | None = None,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    only: str | None = None,
    gpus: Sequence[str] = (),
    contexts: Sequence[int] = (8192, 32768, 131072),
    batches: Sequence[int] = (1, 8, 32),
) -> dict[str, Any]:
    """Run what is wanted and return the numbers, for `report` or as JSON. `__main__` says what the arguments mean.

    Raises:
        InputError: if the text is shorter than `context` tokens.
    """
    source = model or (LLAMA_8B if gpus else SMOLLM2)
    wanted = {only} if only else set(TABLES)
    if gpus:
        wanted = {"roofline"}
    torch.set_num_threads(threads or torch.get_num_threads())
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    return {
        "machine": {
            "cpu": machine_name(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "model": source,
            "date": time.strftime("%Y-%m-%d"),
        },
        "runs": [
            compare(source, getattr(torch, name), context, budget, tokens, rounds)
            for name in dtypes
            if "speed" in wanted
        ],
        "flatness": flatness(source, budget, tokens, rounds) if "flatness" in wanted else [],
        # Peaks are read as Linux tells them.
        "memory": prefill_memory(source, budget) if "memory" in wanted and sys.platform == "linux" else [],
        "quality": quality(source, context) if "quality" in wanted else [],
        "roofline": roofline(source, gpus, contexts, batches) if "roofline" in wanted else [],
    }
