"""Check and time the CUDA path on the GPU at hand: python demos/gpu_check.py --json result.json

Needs this folder, torch >= 2.11, triton >= 3.6 and transformers >= 5.16; no install, no download. Sections run in order
of importance until --minutes are over; one that is left out or fails is recorded as such, and a failure is exit code 1.

--dry runs every line on the CPU, by Triton's interpreter and on tiny shapes: its times mean nothing.
"""

import os
import sys
from pathlib import Path

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
# One compiled step serves caches of several capacities here: its code hands them to the ops and does not look at them.
os.environ["TORCHINDUCTOR_SIZE_ASSERTS"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import passes  # noqa: E402  (the top-level folder, for a checkout that is not installed)

sys.modules.setdefault("ckv_compile.passes", passes)

import argparse  # noqa: E402
import dataclasses  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import platform  # noqa: E402
import statistics  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from typing import Any  # noqa: E402
from unittest import mock  # noqa: E402

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, StaticCache  # noqa: E402

import ckv_compile  # noqa: E402
from ckv_compile import backend, clustering, ops  # noqa: E402
from ckv_compile.cache import CacheShape, CacheState  # noqa: E402
from ckv_compile.kernels import attention, compaction  # noqa: E402
from ckv_compile.model import CKVForCausalLM  # noqa: E402
from ckv_compile.reference import CacheRows, Row, attend_row, compress_row  # noqa: E402
from ckv_compile.roofline import GPUS, floors, llama_8b, shape_of  # noqa: E402
from ckv_compile.runtime import DecodeStep  # noqa: E402
from ckv_compile.schedule import Schedule  # noqa: E402

DEVICE = torch.device("cpu" if DRY else "cuda")
SIZES = {"budget": 96, "chunk_size": 64} if DRY else {"budget": 448, "chunk_size": 128}
SCHEDULE = Schedule(**SIZES, n_sink=4, n_recent=32, r_init=0.5, r_decay=0.01, r_min=0.05)
INTERVAL = 16 if DRY else 64
KEPT = (1.0, 0.5, 0.25)

Result = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------ measuring


def synchronize() -> None:
    if not DRY:
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Median time of one call, by CUDA events around each; the first calls are not counted."""
    if DRY:
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    times = []
    for index in range(repeats + 3):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        run()
        after.record()
        if index == 2:
            torch.cuda.synchronize()
        times.append((before, after))
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in times[3:])


def recorded(run: Callable[[], object]) -> Callable[[], object]:
    """The same work as one CUDA graph, so that the host's part of a launch is not timed."""
    if DRY:
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def peak_gb() -> float:
    return 0.0 if DRY else torch.cuda.max_memory_allocated() / 1e9


def free() -> None:
    gc.collect()
    if not DRY:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def random_state(shape: CacheShape, capacity: int, rows: int, fill: int) -> CacheState:
    """A cache of random slots, as after a long prompt; the time of a step depends on `fill` alone."""
    state = CacheState.allocate(shape, capacity, rows)
    for tensor in (state.keys, state.values):
        tensor.normal_()
    state.degree[..., :fill] = 2.0
    state.queries[..., 1, :] = 1.0  # queries of mean 0 and variance 1
    state.last_queries.normal_(std=shape.head_dim**-0.5)
    state.fill.fill_(fill)
    state.position.fill_(2 * fill)
    return state


# ---------------------------------------------------------------------------------------------------------- correctness


def worst(found: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected number."""
    expected = expected.float()
    return float((found.float().cpu() - expected).abs().max() / expected.abs().max())


def check_kernels() -> Iterator[Result]:
    """Every kernel against the reference."""
    heads, kv_heads = (8, 2)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        for dim in (64,) if DRY else (64, 80, 96, 128, 256):
            torch.manual_seed(0)
            shape = CacheShape(2, kv_heads, heads // kv_heads, dim, dtype, DEVICE)
            capacity = SCHEDULE.budget + INTERVAL
            state = random_state(shape, capacity, 2, 0)
            state.fill.copy_(torch.tensor([capacity - 1, 61]))
            for row, fill in enumerate(state.fill.tolist()):
                state.degree[row, :, :, :fill] = torch.randint(1, 50, (2, kv_heads, fill)).float().to(DEVICE)
            before = CacheState(*(tensor.cpu().clone() for tensor in state))
            q = torch.randn(2, heads, 1, dim, dtype=dtype, device=DEVICE)
            k, v = (torch.randn(2, kv_heads, 1, dim, dtype=dtype, device=DEVICE) for _ in range(2))
            new = [attention.decode_attention(q, k, v, *state[:8], layer, dim**-0.5) for layer in range(2)]
            errors = []
            for row, fill in enumerate(before.fill.tolist()):
                for head in range(heads):
                    own = head * kv_heads // heads
                    slots = Row(
                        torch.cat([before.keys[row, 1, own, :fill], k[row, own].cpu()]).float(),
                        torch.cat([before.values[row, 1, own, :fill], v[row, own].cpu()]).float(),
                        torch.cat([before.degree[row, 1, own, :fill], torch.ones(1)]),
                    )
                    expected = attend_row(q[row, head].cpu().float(), slots, dim**-0.5)
                    errors.append(worst(new[1][row, head], expected))
            yield verdict(f"decode attention D={dim}", dtype, max(errors), tolerance)

            for row, seen in enumerate(before.position.tolist()):
                known = (before.queries[row, 1], before.last_queries[row, 1])
                clustering.observe_(*known, q[row].cpu(), dim**-0.5, seen)
            error = worst(state.queries[:, 1], before.queries[:, 1])
            yield verdict(f"means of the queries D={dim}", dtype, error, 1e-5)
            error = worst(state.last_queries[:, 1], before.last_queries[:, 1])
            yield verdict(f"last queries D={dim}", dtype, error, 1e-2 if dtype == torch.bfloat16 else 1e-6)

            exact = dataclasses.replace(SCHEDULE, n_exact=SCHEDULE.budget // 4)
            exchanged = CacheState(*(tensor.clone() for tensor in state))
            compaction.exchange(*exchanged[:7], exact)
            expected_keys, *_ = clustering.exchange(*(tensor[0].flatten(0, 1) for tensor in state[:5]), exact)
            # Rounding may decide between two slots that are worth the same.
            same = float((exchanged.keys[0].flatten(0, 1) == expected_keys).all(-1).float().mean())
            moved = not torch.equal(exchanged.keys[0], state.keys[0])
            alone = torch.equal(exchanged.keys[1], state.keys[1])  # the row that is not due
            error = 1 - same if moved and alone else 1.0
            yield verdict(f"exchange of exact slots D={dim}, slots that differ", dtype, error, 0.02)

            compaction.compact(*state[:6], state.position, state.active, SCHEDULE)
            errors = []
            for head in range(kv_heads):
                slots = Row(
                    torch.cat([before.keys[0, 0, head, : capacity - 1], k[0, head].cpu()]),
                    torch.cat([before.values[0, 0, head, : capacity - 1], v[0, head].cpu()]),
                    torch.cat([before.degree[0, 0, head, : capacity - 1], torch.ones(1)]),
                )
                merged = compress_row(slots, (INTERVAL,), SCHEDULE)
                found = (part[0, 0, head, : SCHEDULE.budget] for part in (state.keys, state.values, state.degree))
                errors += [worst(one, other) for one, other in zip(found, merged, strict=True)]
            counters = state.fill.tolist() == [SCHEDULE.budget, 62]
            yield verdict(f"compaction of a step D={dim}", dtype, max(errors) if counters else 1.0, tolerance)

            n = 130 if DRY else 3000
            prompt = [torch.randn(kv_heads, n, dim, dtype=dtype, device=DEVICE) for _ in range(2)]
            rounds = SCHEDULE.rounds(n)
            found_rows = compaction.compress(*prompt, torch.ones(kv_heads, n, device=DEVICE), rounds, SCHEDULE)
            ones = torch.ones(n)
            expected_rows = [
                compress_row(Row(prompt[0][h].cpu(), prompt[1][h].cpu(), ones), rounds, SCHEDULE)
                for h in range(kv_heads)
            ]
            # Rounding may decide between two merges that are equally good, and then everything after it differs.
            same = statistics.mean(
                float((found_rows[2][h].cpu() == row.degree).float().mean()) for h, row in enumerate(expected_rows)
            )
            yield verdict(f"compression of a prompt D={dim}, degrees that differ", dtype, 1 - same, 0.05)

            steps = 20 if DRY else 300
            q = torch.randn(heads, steps, dim, dtype=dtype, device=DEVICE)
            k, v = (torch.randn(kv_heads, steps, dim, dtype=dtype, device=DEVICE) for _ in range(2))
            used = int(state.fill[0])
            slots_now = (state.keys[0, 1], state.values[0, 1], state.degree[0, 1])
            out = attention.extend_attention(q, k, v, *slots_now, used, dim**-0.5)
            errors = []
            for head in range(heads):
                own = head * kv_heads // heads
                row_slots = Row(
                    torch.cat([slots_now[0][own, :used], k[own]]).cpu().float(),
                    torch.cat([slots_now[1][own, :used], v[own]]).cpu().float(),
                    torch.cat([slots_now[2][own, :used].cpu(), torch.ones(steps)]),
                )
                expected = attend_row(q[head].cpu().float(), row_slots, dim**-0.5, causal_tail=steps)
                errors.append(worst(out[head], expected))
            yield verdict(f"extend attention D={dim}", dtype, max(errors), tolerance)


def check_windows() -> Iterator[Result]:
    """An exact ring with a score cap and learned sinks, around it and beyond, against the reference."""
    heads, kv_heads, window = 8, 2, 20 if DRY else 500
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        for dim in (64,) if DRY else (64, 256):
            torch.manual_seed(0)
            shape = CacheShape(0, kv_heads, heads // kv_heads, dim, dtype, DEVICE, window, 1, kv_heads, dim)
            state, oracle = CacheState.allocate(shape, SCHEDULE.budget + INTERVAL, 1), CacheRows(SCHEDULE, 10**9)
            sinks = torch.randn(heads, dtype=dtype, device=DEVICE)
            errors = []
            for steps in (window + 30, *[1] * 5, 17):
                q = torch.randn(1, heads, steps, dim, dtype=dtype, device=DEVICE)
                k, v = (torch.randn(1, kv_heads, steps, dim, dtype=dtype, device=DEVICE) for _ in range(2))
                ring = (state.window_keys, state.window_values, state.position, state.active)
                out = ops.window_attention(q, k, v, *ring, 0, dim**-0.5, sinks, 5.0)
                wide = (tensor.cpu().float() for tensor in (q, k, v))
                expected = oracle.attend(0, *wide, dim**-0.5, 5.0, sinks.cpu().float(), window)
                ops.compact_(*state[:8], steps, *dataclasses.astuple(SCHEDULE))
                errors.append(worst(out, expected))
            yield verdict(f"window, cap and sinks D={dim}", dtype, max(errors), tolerance)


def check_int8() -> Iterator[Result]:
    """Slots of 8 bits over a compaction, and in a later turn, against the reference."""
    heads, kv_heads, capacity = 8, 2, SCHEDULE.budget + INTERVAL
    for dtype, tolerance in (
        (torch.float32, 1e-2),
        (torch.bfloat16, 4e-2),
    ):  # a merged number may be rounded either way
        for dim in (64,) if DRY else (64, 128):
            torch.manual_seed(0)
            shape = CacheShape(1, kv_heads, heads // kv_heads, dim, dtype, DEVICE, int8=True)
            state, oracle = CacheState.allocate(shape, capacity, 1), CacheRows(SCHEDULE, capacity, int8=True)
            errors = []
            for steps in (capacity - 2, 1, 1, 1, 7):
                q = torch.randn(1, heads, steps, dim, dtype=dtype, device=DEVICE)
                k, v = (torch.randn(1, kv_heads, steps, dim, dtype=dtype, device=DEVICE) for _ in range(2))
                plan = dataclasses.astuple(SCHEDULE)
                out = ops.cached_attention(q, k, v, *state[:8], 0, dim**-0.5, None, 0.0, *plan)
                ops.compact_(*state[:8], steps, *plan)
                errors.append(worst(out, oracle.attend(0, *(new.cpu().float() for new in (q, k, v)), dim**-0.5)))
                oracle.finish_step(steps)
            compacted = int(state.fill) == SCHEDULE.budget + 8
            yield verdict(f"slots of 8 bits D={dim}", dtype, max(errors) if compacted else 1.0, tolerance)


def verdict(what: str, dtype: torch.dtype, error: float, tolerance: float) -> Result:
    return {"check": what, "dtype": str(dtype)[6:], "error": error, "allowed": tolerance, "ok": error < tolerance}


def tiny(hidden: int = 256) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
        eos_token_id=None,
    )


def check_recorded_step() -> Iterator[Result]:
    """The recorded step against the same graph run eagerly, over compactions; and generate() by both."""
    for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 5e-2))[: 1 if DRY else 2]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny(), dtype=dtype).to(DEVICE).eval()
        options = {"budget": 64, "interval": 16, "n_recent": 8, "chunk_size": 32}
        eager = ckv_compile.transform(model, compile="eager", **options)
        ours = ckv_compile.transform(model, **options)
        ids = torch.randint(0, 512, (2, 104 if DRY else 200), device=DEVICE)
        prompt = 84 if DRY else 100  # more than the capacity
        caches = [eager.new_cache(2), ours.new_cache(2)]
        errors = []
        for chunk in (ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)):
            one, other = (
                each(chunk, past_key_values=cache).logits for each, cache in zip((eager, ours), caches, strict=True)
            )
            errors.append(float((one - other).float().abs().max() / one.float().abs().max()))
        # Rounding may decide between two equal merges: the middle of the errors is what a wrong kernel would lift.
        yield verdict("recorded step against eager", dtype, statistics.median(errors), tolerance)
        options = {"pad_token_id": 0, "attention_mask": torch.ones(2, 50, dtype=torch.int64, device=DEVICE)}
        tokens = [each.generate(ids[:, :50], max_new_tokens=8, do_sample=False, **options) for each in (eager, ours)]
        if dtype == torch.float32:  # in bfloat16 rounding decides between tokens that are nearly as likely
            agree = float((tokens[0] == tokens[1]).float().mean())
            yield verdict("generate() against eager, tokens that differ", dtype, 1 - agree, 0.05)
        # Rows that end early, twice by one recording: the host runs ahead, the cache must not.
        end = int(tokens[1][0, 55])
        options |= {"max_new_tokens": 12 if DRY else 40, "do_sample": True, "top_k": 5, "eos_token_id": end}
        cache = ours.new_cache(2)
        for _ in range(2):
            cache.reset()
            rows = ours.generate(ids[:, :50], past_key_values=cache, **options).tolist()
            ends = [row.index(end, 50) + 1 if end in row[50:] else len(row) for row in rows]
            right = cache.state.position.tolist() == [min(each, len(rows[0]) - 1) for each in ends]
            right &= all(set(row[each:]) <= {0} for row, each in zip(rows, ends, strict=True))
            yield verdict("rows that end early", dtype, 0.0 if right else 1.0, 0.5)


class Smallest:
    """A model of 32 hidden, and the tokens of its eager graph over a compaction."""

    def __init__(self) -> None:
        self.options = {"budget": 40, "interval": 8, "n_recent": 8, "chunk_size": 8}
        torch.manual_seed(0)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny(32), dtype=torch.float32).to(DEVICE).eval()
        self.ours = ckv_compile.transform(self.model, compile="eager", **self.options)
        ids = torch.randint(0, 512, (1, 46 if DRY else 60), device=DEVICE)
        self.inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        self.greedy = {"max_new_tokens": 4 if DRY else 20, "do_sample": False, "pad_token_id": 0}
        self.tokens = self.ours.generate(**self.inputs, **self.greedy)

    def differ(self, tokens: Tensor) -> float:
        """The share of new tokens that are not those of the eager graph."""
        new = (tokens == self.tokens)[:, self.inputs["input_ids"].shape[1] :]
        return 1 - float(new.float().mean())


def check_artifact() -> Iterator[Result]:
    """The step compiled ahead of time, with its kernels inside, loaded and recorded."""
    small = Smallest()
    with tempfile.TemporaryDirectory() as folder:
        small.ours.save_pretrained(folder, aot=[1])
        loaded = ckv_compile.load(folder, compile="aot")
        for call in ("first", "second")[: 1 if DRY else 2]:  # the second replays what the first recorded
            differ = small.differ(loaded.generate(**small.inputs, **small.greedy))
            yield verdict(f"loaded package, {call} call, tokens that differ", torch.float32, differ, 0.05)


def check_backend() -> Iterator[Result]:
    """An original model in transformers' own loop, its step recorded by Inductor."""
    small = Smallest()
    cache = ckv_compile.cache_for(small.model, **small.options)
    mode = "eager" if DRY else "reduce-overhead"
    # By itself and not by its name, which a checkout that is not installed has not registered.
    small.model.forward = torch.compile(small.model.forward, backend=backend.backend, mode=mode)
    for call in ("first", "second")[: 1 if DRY else 2]:
        cache.reset()
        differ = small.differ(small.model.generate(**small.inputs, past_key_values=cache, **small.greedy))
        yield verdict(f"backend, {mode}, {call} call, tokens that differ", torch.float32, differ, 0.05)


# ------------------------------------------------------------------------------------------------------------- timings

_compact = compaction.compact


def compact_to_capacity(keys: Tensor, *arguments: Any) -> None:
    """Compaction in a step that was compiled for one budget and runs on caches of several: to capacity - INTERVAL."""
    sizes = SIZES | {"budget": keys.shape[3] - INTERVAL}
    schedule = ckv_compile.CKVConfig(**sizes, interval=INTERVAL).schedule
    _compact(keys, *arguments[:7], schedule, *arguments[8:])


def time_attention() -> Iterator[Result]:
    """The decode kernel beside SDPA over the same slots and a copy of as many bytes."""
    for rows in (1,) if DRY else (1, 8):
        for slots in (64,) if DRY else (2048, 8192, 32768, 131072):
            yield time_attention_at(rows, slots)
            free()


def time_attention_at(rows: int, slots: int, kv_heads: int = 8, group: int = 4, dim: int = 128) -> Result:
    size = 2 * rows * kv_heads * slots * dim * 2
    layers = 2 if DRY else max(2, min(256, 2**30 // size))  # more than the L2 cache holds, taken in turn
    state = random_state(CacheShape(layers, kv_heads, group, dim, torch.bfloat16, DEVICE), slots, rows, slots - 1)
    q = torch.randn(rows, kv_heads * group, 1, dim, dtype=torch.bfloat16, device=DEVICE)
    k, v = q[:, :kv_heads].clone(), q[:, kv_heads : 2 * kv_heads].clone()

    def ours() -> None:
        for layer in range(layers):
            attention.decode_attention(q, k, v, *state[:8], layer, dim**-0.5)

    def sdpa() -> None:
        for layer in range(layers):
            F.scaled_dot_product_attention(q, state.keys[:, layer], state.values[:, layer], enable_gqa=True)

    copied = torch.empty_like(state.keys)
    copy = 2 * state.keys.nbytes / milliseconds(lambda: copied.copy_(state.keys), 5) / 1e6  # GB/s, read and written
    spent = milliseconds(recorded(ours), 10) / layers
    theirs = milliseconds(recorded(sdpa), 10) / layers
    reached = (size + 4 * rows * kv_heads * slots) / spent / 1e6
    return {
        "rows": rows,
        "slots": slots,
        "us": 1e3 * spent,
        "sdpa_us": 1e3 * theirs,
        "gb_s": reached,
        "copy_gb_s": copy,
        "of_copy": reached / copy,
        "vs_sdpa": theirs / spent,
    }


class Model:
    """The Llama-3.1-8B-shaped model with random weights, transformed, and its compiled step by batch size."""

    def __init__(self, layers: int) -> None:
        config = tiny() if DRY else llama_8b()
        if not DRY:
            config.num_hidden_layers = layers
        torch.manual_seed(0)
        with DEVICE:
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.ours: CKVForCausalLM = ckv_compile.transform(self.model, **SIZES, interval=INTERVAL, max_batch_size=64)
        self.shape = shape_of(config)

    def step(self, slots: int, rows: int) -> tuple[DecodeStep, CacheState]:
        """A recorded step of `rows` rows that have `slots` slots each."""
        self.ours.warm_up(rows)
        self.ours.release()
        state = random_state(self.ours.cache_shape, slots + INTERVAL, rows, slots)
        with torch.no_grad():
            program = self.ours._decode_programs[rows]
            step = DecodeStep(program, state, None, self.model.config.vocab_size, record=not DRY)
        return step, state


def time_step(model: Model, contexts: tuple[int, ...], rows: int) -> Iterator[Result]:
    """A decode step of the whole model, ours at each kept fraction, with its share of the compactions."""
    gpu = GPUS.get(gpu_name())
    for context in contexts:
        for kept in KEPT:
            free()
            slots = int(kept * context)
            try:
                with mock.patch.object(compaction, "compact", compact_to_capacity), torch.no_grad():
                    step, state = model.step(slots, rows)
                    spent = milliseconds(step.run, 20)
                    idle, busy = time_compaction(state)
            except torch.OutOfMemoryError:
                yield {"method": "ckv_compile", "context": context, "rows": rows, "kept": kept, "ms": None}
                continue
            floor = next(floors(gpu, model.shape, [context], [kept], [rows], INTERVAL)) if gpu else None
            compactions = (busy - idle) / INTERVAL if kept < 1 else 0.0
            yield {
                "method": "ckv_compile",
                "context": context,
                "rows": rows,
                "kept": kept,
                "ms": spent + compactions,
                "floor_ms": 1e3 * floor.clustered_seconds if floor else None,
                "compactions_share": compactions / spent,
                "compaction_ms": busy,
                "guard_share_at_most": idle / spent,  # with the launch of a graph of its own
                "cache_gb": sum(t.nbytes for t in state[:3]) / 1e9,
                "peak_gb": peak_gb(),
            }
            del step, state


def time_compaction(state: CacheState) -> tuple[float, float]:
    """Milliseconds of the compaction of all layers when no row is due, and when all are."""
    arguments = (*state[:6], state.position, state.active, SCHEDULE)
    state.degree.fill_(1.0)

    def due() -> None:
        state.fill.fill_(state.keys.shape[3] - 1)
        compact_to_capacity(*arguments)

    state.fill.fill_(0)
    idle = milliseconds(recorded(lambda: compact_to_capacity(*arguments)), 10)
    busy = milliseconds(recorded(due), 3)
    return idle, busy


def time_static_cache(model: Model, contexts: tuple[int, ...]) -> Iterator[Result]:
    """A decode step of transformers' static cache, compiled with its CUDA graphs."""
    for context in contexts:
        free()
        yield time_static_cache_at(model.model, context)


@torch.no_grad()
def time_static_cache_at(model: PreTrainedModel, context: int) -> Result:
    torch._dynamo.reset()
    cache = StaticCache(model.config, max_cache_len=context)
    ids = torch.ones(1, 1, dtype=torch.int64, device=DEVICE)
    compiled = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True, dynamic=False)
    model(ids.expand(1, 4), past_key_values=cache)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(context - 40)
    return {
        "method": "transformers, static, compiled",
        "context": context,
        "rows": 1,
        "kept": 1.0,
        "ms": milliseconds(lambda: compiled(ids, past_key_values=cache, logits_to_keep=1), 3 if DRY else 20),
        "cache_gb": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / 1e9,
        "peak_gb": peak_gb(),
    }


def time_generate(model: Model) -> Iterator[Result]:
    """A prompt through prefill and the generation loop, beside the bare step; the prefill beside the model's own."""
    length = 120 if DRY else 8192
    ids = torch.randint(0, model.model.config.vocab_size, (1, length), device=DEVICE)
    # An end that is never drawn, so that it is looked for at every step.
    options = {"do_sample": True, "top_k": 50, "temperature": 0.8, "eos_token_id": 10**6, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(ids)
    tokens = 4 if DRY else 128

    def seconds(run: Callable[[], object]) -> float:
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        return time.perf_counter() - start

    def generate(count: int) -> float:
        def run() -> None:
            made = model.ours.generate(ids, max_new_tokens=count, **options).shape[1] - length
            assert made == count, f"{made} tokens were made, not {count}"

        return seconds(run)

    with torch.no_grad():
        generate(2)
        rounds = 1 if DRY else 3
        prefill = statistics.median(generate(1) for _ in range(rounds))
        per_token = statistics.median((generate(tokens + 1) - prefill) / tokens for _ in range(rounds))
        own = statistics.median(seconds(lambda: model.model(ids, logits_to_keep=1)) for _ in range(rounds + 1))
        step, _ = model.step(SCHEDULE.budget, 1)  # of the capacity that it was compiled for
        bare = milliseconds(step.run, 20)
    yield {
        "context": length,
        "kept": SCHEDULE.budget / length,
        "prefill_s": prefill,
        "prefill_of_the_model_s": own,
        "ms_per_token": 1e3 * per_token,
        "bare_step_ms": bare,
        "over_bare": 1e3 * per_token / bare - 1,  # sampling, compactions and the loop
    }


# ------------------------------------------------------------------------------------------------------------- the run


def gpu_name() -> str:
    name = "dry run" if DRY else torch.cuda.get_device_name()
    return next((known for known in GPUS if known in name), name)


def table(rows: list[Result]) -> str:
    """Rows of one section, aligned."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([shown(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on the CPU, tiny, by Triton's interpreter")
    parser.add_argument("--minutes", type=float, default=4.0, help="start no section after this (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=32, help="layers of the large model (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        parser.error("no CUDA device is here; --dry runs every line on the CPU")
    start = time.perf_counter()
    contexts = (208, 240) if DRY else (8192, 32768, 131072)
    built: list[Model] = []

    def model() -> Model:
        if not built:
            built.append(Model(args.layers))
        return built[0]

    sections: dict[str, Callable[[], Iterator[Result]]] = {
        "kernels against the reference": check_kernels,
        "windows, score caps and sinks against the reference": check_windows,
        "slots of 8 bits against the reference": check_int8,
        "recorded step against eager": check_recorded_step,
        "a saved model's compiled step against eager": check_artifact,
        'the backend "ckv" against eager': check_backend,
        "decode attention, bfloat16, 8 KV heads of 128, 4 query heads each": time_attention,
        "decode step": lambda: time_step(model(), contexts, rows=1),
        "generate": lambda: time_generate(model()),
        "transformers, longest context": lambda: time_static_cache(model(), contexts[-1:]),
        "decode step, as many rows as the full cache can hold": lambda: time_step(
            model(), contexts[-1:], rows=2 if DRY else 6
        ),
        "transformers, shorter contexts": lambda: time_static_cache(model(), contexts[:-1]),
    }
    result: Result = {
        "machine": {
            "gpu": "dry run" if DRY else torch.cuda.get_device_name(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "transformers": transformers.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "layers": args.layers,
        },
        "sections": {},
    }
    print(", ".join(f"{name} {value}" for name, value in result["machine"].items()), flush=True)
    failed, left_out = False, 0
    for name, section in sections.items():
        elapsed = time.perf_counter() - start
        print(f"\n[{elapsed:5.0f} s] {name}", flush=True)
        if elapsed > 60 * args.minutes:
            print(f"left out: {args.minutes:g} minutes are over")
            result["sections"][name] = "left out"
            left_out += 1
            continue
        rows: list[Result] = []
        try:
            for row in section():
                rows.append(row)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            failed = True
            rows.append({"failed": traceback.format_exc(limit=-3)})
        failed |= any(row.get("ok") is False for row in rows)
        result["sections"][name] = rows
        print(table([row for row in rows if "failed" not in row]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    outcome = "FAILED" if failed else "all checks passed" if not left_out else f"{left_out} sections left out"
    print(f"\n{outcome} in {time.perf_counter() - start:.0f} s")
    sys.exit(failed)


if __name__ == "__main__":
    main()
