"""The two ops against the oracle, over streams of tokens that compact again and again."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

import pytest
import torch
import torch.nn.functional as F
from conftest import needs_kernel
from torch import Tensor

from ckv_compile import ops, slots
from ckv_compile.cache import CacheShape, CacheState, Group
from ckv_compile.ops import append_, attention, cached_attention, compact_, window_attention
from ckv_compile.reference import CacheRows, Row, compress_row
from ckv_compile.schedule import Schedule

LAYERS, HEADS, KV_HEADS, SCALE = 2, 6, 2, 0.3
SCHEDULE = Schedule(budget=24, n_sink=2, n_recent=4, chunk_size=8, r_init=0.5, r_decay=0.1, r_min=0.2)
PLAN = dataclasses.astuple(SCHEDULE)
EXACT = dataclasses.replace(SCHEDULE, n_exact=7)
CAPACITY = 32  # so that a row of 24 slots is full after 8 tokens

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.int8: 2e-5}  # of what a step gives and the state holds
FLIPPED = 0.05  # more than the step of a slot of 8 bits: a number between two may be rounded to either


class Turn(NamedTuple):
    """S new tokens of some rows, for every layer: q [L, B, H, S, D], k and v [L, B, Hkv, S, D]."""

    q: Tensor
    k: Tensor
    v: Tensor

    def row(self, b: int) -> "Turn":
        return Turn(*(part[:, b : b + 1] for part in self))


def random_turn(rows: int, steps: int, dim: int, dtype: torch.dtype, seed: int) -> Turn:
    generator = torch.Generator().manual_seed(seed)

    dtype = torch.float32 if dtype == torch.int8 else dtype

    def randn(heads: int) -> Tensor:
        return torch.randn(LAYERS, rows, heads, steps, dim, dtype=torch.float64, generator=generator).to(dtype)

    return Turn(randn(HEADS), randn(KV_HEADS), randn(KV_HEADS))


def empty_state(rows: int, dim: int, dtype: torch.dtype, capacity: int = CAPACITY) -> CacheState:
    """A state of that dtype; int8 are slots of 8 bits of a model in float32."""
    int8 = dtype == torch.int8
    model = (torch.float32 if int8 else dtype, torch.device("cpu"))
    return CacheState.allocate(CacheShape(LAYERS, KV_HEADS, HEADS // KV_HEADS, dim, *model, int8=int8), capacity, rows)


def run_ops(state: CacheState, turn: Turn, plan: tuple[int | float, ...] = PLAN) -> Tensor:
    """One step of a model: attention in every layer, then the compaction. Returns [L, B, H, S, D]."""
    cache = state[:8]
    out = [
        cached_attention(q, k, v, *cache, layer, SCALE, None, 0.0, *plan)
        for layer, (q, k, v) in enumerate(zip(*turn, strict=True))
    ]
    compact_(*state[:8], turn.q.shape[3], *plan)
    return torch.stack(out)


def run_oracle(oracle: CacheRows, turn: Turn) -> Tensor:
    out = [oracle.attend(layer, q, k, v, SCALE) for layer, (q, k, v) in enumerate(zip(*turn, strict=True))]
    oracle.finish_step(turn.q.shape[3])
    return torch.stack(out)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal within rounding; of what comes of slots of 8 bits, a few numbers may be off by a step."""
    torch.testing.assert_close(found, expected, rtol=0, atol=FLIPPED if dtype == torch.int8 else TOLERANCE[dtype])
    assert float(((found - expected).abs() > TOLERANCE[dtype]).float().mean()) < 0.05


def assert_state_equals(state: CacheState, oracles: list[CacheRows], tolerance: float) -> None:
    """Keys, values, degree, queries, fill and position of every row, layer and head."""
    for b, oracle in enumerate(oracles):
        fill = int(state.fill[b])
        assert int(state.position[b]) == oracle.position[0]
        for layer, h in itertools.product(range(LAYERS), range(KV_HEADS)):
            row, queries = oracle.rows[0, layer, h], oracle.queries[0, layer, h]
            torch.testing.assert_close(state.queries[b, layer, h], torch.stack(queries[:2]), rtol=0, atol=tolerance)
            assert torch.equal(state.last_queries[b, layer, h], queries.last)
            assert fill == row.degree.shape[0]
            held = slots.read(*(part[b, layer, h, :fill] for part in (state.keys, state.values, state.degree)))
            torch.testing.assert_close(held[0], row.keys, rtol=0, atol=tolerance)
            torch.testing.assert_close(held[1], row.values, rtol=0, atol=tolerance)
            assert torch.equal(held[2], row.degree)
            empty = slots.weights(state.keys, state.degree)[b, layer, h, fill:]
            assert not empty.any(), "slots past fill are empty"
            assert float(row.degree.sum()) == int(state.position[b]), "a slot stands for its tokens"


# The turns of a stream by their lengths: short and long prompts, single steps, later turns on a filled cache.
STREAMS = {
    "prompt-under-capacity": [20, *[1] * 40],
    "prompt-of-capacity": [32, *[1] * 30],
    "prompt-over-capacity": [100, *[1] * 30],
    "one-token-at-a-time": [1] * 70,
    "short-turn-that-fits": [20, *[1] * 20, 3, *[1] * 24],
    "long-turn-that-compresses": [40, *[1] * 26, 50, *[1] * 18],
}


@pytest.mark.parametrize("schedule", [SCHEDULE, EXACT], ids=["centroids", "exact"])
@pytest.mark.parametrize("dim", [8, 5], ids=["kernel-shape", "odd-head-dim"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_of_two_rows_equals_the_oracle_at_every_step(
    name: str, dtype: torch.dtype, dim: int, schedule: Schedule
) -> None:
    """After the first turn row 1 takes 3 tokens by itself: from there the rows are full at different steps."""
    state = empty_state(2, dim, dtype)
    oracles = [CacheRows(schedule, CAPACITY, int8=dtype == torch.int8) for _ in range(2)]
    plan = dataclasses.astuple(schedule)
    compactions = []
    for step, steps in enumerate(STREAMS[name]):
        turn, before = random_turn(2, steps, dim, dtype, seed=step), state.fill.clone()
        out = run_ops(state, turn, plan)
        if steps == 1:
            compactions += (state.fill < before).nonzero().tolist()
        for b, oracle in enumerate(oracles):
            expected = run_oracle(oracle, turn.row(b))
            assert_near(out[:, b : b + 1], expected, dtype)
        assert_state_equals(state, oracles, FLIPPED if dtype == torch.int8 else TOLERANCE[dtype])
        if step == 0:
            run_ops(state.row(1), turn_of_3 := random_turn(1, 3, dim, dtype, seed=1000), plan)
            run_oracle(oracles[1], turn_of_3)
            assert state.fill[0] != state.fill[1]
    assert compactions.count([0]) >= 3, "compacted while decoding"
    assert compactions.count([1]) >= 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("turns", [[1] * 20, [20], [12, *[1] * 8], [5, 1, 6, 1, 7]], ids=str)
def test_while_all_tokens_fit_it_is_plain_causal_attention(turns: list[int], dtype: torch.dtype) -> None:
    total = sum(turns)
    everything = random_turn(2, total, 8, dtype, seed=1)
    state = empty_state(2, 8, dtype)
    out = torch.cat(
        [run_ops(state, Turn(*part)) for part in zip(*(t.split(turns, dim=3) for t in everything), strict=True)], dim=3
    )
    expected = F.scaled_dot_product_attention(
        everything.q.flatten(0, 1),
        everything.k.flatten(0, 1).repeat_interleave(HEADS // KV_HEADS, 1),
        everything.v.flatten(0, 1).repeat_interleave(HEADS // KV_HEADS, 1),
        is_causal=True,
        scale=SCALE,
    )
    torch.testing.assert_close(out.flatten(0, 1), expected, rtol=0, atol=TOLERANCE[dtype] / 4)
    assert state.fill.tolist() == state.position.tolist() == [total, total]
    assert torch.equal(state.keys[:, :, :, :total], everything.k.transpose(0, 1))
    assert torch.equal(state.degree, torch.ones_like(state.degree) * (torch.arange(CAPACITY) < total))


def opcheck_samples() -> Iterator[tuple[str, Tensor, int, int]]:
    for dtype, dim, steps in itertools.product((torch.float32, torch.bfloat16, torch.int8), (8, 5), (1, 3, 40)):
        yield f"{str(dtype)[6:]}-D{dim}-S{steps}", torch.empty(0, dtype=dtype), dim, steps


@pytest.mark.parametrize(
    ("dtype", "dim", "steps"), [pytest.param(t.dtype, dim, steps, id=name) for name, t, dim, steps in opcheck_samples()]
)
def test_opcheck(dtype: torch.dtype, dim: int, steps: int) -> None:
    """What torch.library can check: the schema's mutations, fake tensors, autograd, and compiled tracing."""
    state = empty_state(2, dim, dtype)
    run_ops(state, random_turn(2, 31, dim, dtype, seed=0))  # one slot is free
    q, k, v = (part[0] for part in random_turn(2, steps, dim, dtype, seed=1))
    int8, dtype = dtype == torch.int8, q.dtype
    sinks = torch.randn(HEADS, dtype=dtype)
    for extra in ((None, 0.0), (sinks, 5.0)):
        torch.library.opcheck(attention, (q, k, v, None, extra[0], SCALE, extra[1], 2))
        torch.library.opcheck(cached_attention, (q, k, v, *state[:8], 1, SCALE, *extra, *PLAN))
        ring = torch.zeros(2, LAYERS, KV_HEADS, 7, dim, dtype=dtype)
        arguments = (q, k, v, ring, ring.clone(), state.position, state.active, 1, SCALE, *extra)
        torch.library.opcheck(window_attention, arguments)
    torch.library.opcheck(compact_, (*state[:8], steps, *PLAN))
    torch.library.opcheck(compact_, (*state[:7], None, steps, *PLAN))
    shape = CacheShape(LAYERS, KV_HEADS, 3, dim, dtype, torch.device("cpu"), 7, LAYERS, KV_HEADS, dim, (0, 1), int8)
    for group in get_args(Group):
        others = CacheState.allocate(shape, 1, 2, CAPACITY)[8:]
        arguments = (k, v, *state[:8], *others, 1, group, *PLAN, torch.tensor([0, steps - 1]))
        torch.library.opcheck(append_, arguments)
        torch.library.opcheck(append_, arguments, {"q": q, "scale": SCALE})


@pytest.mark.parametrize("kernel", [pytest.param("1", marks=needs_kernel), "0"], ids=["kernel", "pytorch"])
@pytest.mark.parametrize("sinks", [None, torch.tensor([3.0, -1.0, 0.0, 9.0, 0.5, -20.0])], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [0.0, 2.0], ids=["", "softcap"])
@pytest.mark.parametrize("window", [0, 1, 7, 40], ids="window-{}".format)
def test_windows_score_caps_and_sinks_equal_the_oracle_at_every_step(
    window: int, softcap: float, sinks: Tensor | None, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts shorter and longer than the window, steps that go around the ring, later turns; one row is ahead."""
    monkeypatch.setenv("CKV_CPU_KERNEL", kernel)
    monkeypatch.setattr(ops, "EXTEND_BLOCK", 9)
    shape = CacheShape(
        0 if window else LAYERS, KV_HEADS, 3, 8, torch.float32, torch.device("cpu"), window, LAYERS, KV_HEADS, 8
    )
    state, oracles = CacheState.allocate(shape, CAPACITY, 2), [CacheRows(SCHEDULE, CAPACITY) for _ in range(2)]

    def step(rows: CacheState, turn: Turn, oracles: list[CacheRows]) -> None:
        for layer, (q, k, v) in enumerate(zip(*turn, strict=True)):
            if window:
                ring = (rows.window_keys, rows.window_values, rows.position, rows.active)
                out = window_attention(q, k, v, *ring, layer, SCALE, sinks, softcap)
            else:
                out = cached_attention(q, k, v, *rows[:8], layer, SCALE, sinks, softcap, *PLAN)
            for b, oracle in enumerate(oracles):
                row = (part[b : b + 1].double() for part in (q, k, v))
                expected = oracle.attend(layer, *row, SCALE, softcap, sinks, window)
                torch.testing.assert_close(out[b : b + 1], expected.float(), rtol=0, atol=5e-5)
        compact_(*rows[:8], turn.q.shape[3], *PLAN)
        for oracle in oracles:
            oracle.finish_step(turn.q.shape[3])

    step(state.row(1), random_turn(1, 3, 8, torch.float32, seed=99), oracles[1:])
    for seed, steps in enumerate([5, *[1] * 12, 3, 60, 1, 1, 6, *[1] * 12]):
        step(state, random_turn(2, steps, 8, torch.float32, seed=seed), oracles)
    state.active[0] = False
    before = CacheState(*(part.clone() for part in state))
    step(state, random_turn(2, 1, 8, torch.float32, seed=77), [])
    for old, now in zip(before, state, strict=True):
        assert torch.equal(old[0], now[0])
    assert state.position[1] == before.position[1] + 1


@needs_kernel
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.int8, 2e-6)])
@pytest.mark.parametrize("fill", [(0, 31), (1, 17), (30, 8)], ids=str)
def test_the_kernel_and_the_pytorch_form_of_decode_agree(
    fill: tuple[int, int], dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = empty_state(2, 16, dtype)
    for b, used in enumerate(fill):
        if used:
            run_ops(state.row(b), random_turn(1, used, 16, dtype, seed=used))
            slots.weights(state.keys, state.degree)[b, :, :, :used] += torch.arange(used) % 5
    other = CacheState(*(part.clone() for part in state))
    turn = random_turn(2, 1, 16, dtype, seed=1)
    with_kernel = run_ops(state, turn)
    monkeypatch.setenv("CKV_CPU_KERNEL", "0")
    without = run_ops(other, turn)
    torch.testing.assert_close(with_kernel, without, rtol=0, atol=tolerance)
    for name, ours in state._asdict().items():  # the same cache; what queries add up to is rounded in another order
        atol = 1e-6 if name == "queries" else 0.0
        torch.testing.assert_close(ours, getattr(other, name), rtol=0, atol=atol)


@pytest.mark.parametrize("kernel", [pytest.param("1", marks=needs_kernel), "0"], ids=["kernel", "pytorch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows at different fill, through decode compactions and a long turn."""
    monkeypatch.setenv("CKV_CPU_KERNEL", kernel)
    together = empty_state(3, 16, dtype)
    alone = [empty_state(1, 16, dtype) for _ in range(3)]
    for b, prompt in enumerate((9, 45, 30)):
        turn = random_turn(1, prompt, 16, dtype, seed=prompt)
        assert torch.equal(run_ops(together.row(b), turn), run_ops(alone[b], turn))
    for step, steps in enumerate([*[1] * 30, 20, *[1] * 10]):
        turn = random_turn(3, steps, 16, dtype, seed=step)
        out = run_ops(together, turn)
        for b in range(3):
            assert torch.equal(run_ops(alone[b], turn.row(b)), out[:, b : b + 1])
    for b in range(3):
        for whole, single in zip(together.row(b), alone[b], strict=True):
            assert torch.equal(whole, single)


@pytest.mark.parametrize("dim", [8, 5], ids=["kernel-shape", "odd-head-dim"])
@pytest.mark.parametrize("schedule", [SCHEDULE, EXACT], ids=["centroids", "exact"])
def test_a_batch_of_some_rows_of_a_state_has_the_bits_of_these_rows(schedule: Schedule, dim: int) -> None:
    """Rows 3, 0 and 1 of five, in this order and in two batches; row 0 is not active and is named twice."""
    state, plan = empty_state(5, dim, torch.float32), dataclasses.astuple(schedule)
    state.active[0] = False
    for b, prompt in ((1, 9), (2, 45), (3, 30)):
        run_ops(state.row(b), random_turn(1, prompt, dim, torch.float32, seed=prompt), plan)
    other = CacheState(*(part.clone() for part in state))
    for step in range(40):
        taking = torch.tensor([3, 0, 1, 0] if step % 3 else [1])
        turn = random_turn(len(taking), 1, dim, torch.float32, seed=step)
        out = []
        for layer, (q, k, v) in enumerate(zip(*turn, strict=True)):
            out.append(cached_attention(q, k, v, *state.main, layer, SCALE, None, 0.0, *plan, rows=taking))
        compact_(*state.main, 1, *plan, rows=taking)
        for i, b in enumerate(taking.tolist()):
            assert torch.equal(torch.stack(out)[:, i : i + 1], run_ops(other.row(b), turn.row(i), plan))
        for ours, theirs in zip(state, other, strict=True):
            assert torch.equal(ours, theirs)
    assert state.fill.tolist()[::2] == [0, 24, 0]
    assert (state.position[[1, 3]] > state.fill[[1, 3]]).all(), "they were compacted"


@pytest.mark.parametrize("group", ["main", "light"])
@pytest.mark.parametrize("turns", [[20, 5], [100], [20, 60]], ids=str)
def test_appending_with_queries_leaves_what_attention_leaves(turns: list[int], group: Group) -> None:
    plan, theirs = dataclasses.astuple(EXACT), empty_state(2, 8, torch.float32)
    heads = (KV_HEADS, HEADS // KV_HEADS)
    shape = CacheShape(LAYERS, *heads, 8, torch.float32, torch.device("cpu"), light_layers=(0, 1))
    ours = CacheState.allocate(shape, CAPACITY, 2, CAPACITY)
    for steps in turns:
        turn = random_turn(2, steps, 8, torch.float32, seed=steps)
        run_ops(theirs, turn, plan)
        for layer, (q, k, v) in enumerate(zip(*turn, strict=True)):
            append_(k, v, *ours, layer, group, *plan, q=q, scale=SCALE)
        compact_(*getattr(ours, group), steps, *plan)
    for name, left, right in zip(CacheState._fields, getattr(ours, group), theirs.main, strict=False):
        assert torch.equal(left, right), name


def test_rows_are_for_one_new_token() -> None:
    turn, state = random_turn(1, 2, 8, torch.float32, seed=0), empty_state(3, 8, torch.float32)
    with pytest.raises(ValueError, match="2 tokens a row, and rows of a larger state"):
        cached_attention(*(part[0] for part in turn), *state.main, 0, SCALE, None, 0.0, *PLAN, rows=torch.tensor([1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_near_the_float32_oracle(dtype: torch.dtype) -> None:
    """The state is rounded to its dtype at each compaction, by op and oracle alike; outputs differ by rounding."""
    state, oracle = empty_state(1, 16, dtype), CacheRows(SCHEDULE, CAPACITY)
    for step, steps in enumerate([40, *[1] * 30, 20, *[1] * 8]):
        turn = random_turn(1, steps, 16, dtype, seed=step)
        expected = run_oracle(oracle, turn)
        torch.testing.assert_close(run_ops(state, turn), expected, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert_state_equals(state, [oracle], tolerance=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kernel", [pytest.param("1", marks=needs_kernel), "0"], ids=["kernel", "pytorch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("steps", [1, 5])
def test_large_degrees_cost_no_precision(
    steps: int, dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of a large degree needs more bits than a 16-bit type has: only the output may be rounded to it."""
    monkeypatch.setenv("CKV_CPU_KERNEL", kernel)
    used, capacity = 400, 500
    state = empty_state(1, 64, dtype, capacity)
    run_ops(state, random_turn(1, used, 64, dtype, seed=0))
    state.degree[..., :used] = torch.randint(1, 2000, (used,), generator=torch.Generator().manual_seed(0)).float()
    q, k, v = (part[1] for part in random_turn(1, steps, 64, dtype, seed=1))
    oracle = CacheRows(SCHEDULE, capacity)
    for h in range(KV_HEADS):
        slots = (state.keys[0, 1, h, :used], state.values[0, 1, h, :used], state.degree[0, 1, h, :used])
        oracle.rows[0, 1, h] = Row(*(part.double() for part in slots))
    expected = oracle.attend(1, q.double(), k.double(), v.double(), 0.125)
    out = cached_attention(q, k, v, *state[:8], 1, 0.125, None, 0.0, *PLAN)
    assert (out.double() - expected).norm() / expected.norm() < torch.finfo(dtype).eps / 2


def test_compaction_leaves_rows_alone_that_have_a_free_slot() -> None:
    state = empty_state(2, 8, torch.float32)
    for b, prompt in enumerate((31, 12)):
        run_ops(state.row(b), random_turn(1, prompt, 8, torch.float32, seed=b))
    turn = random_turn(2, 1, 8, torch.float32, seed=9)
    cache = state[:8]
    for layer, (q, k, v) in enumerate(zip(*turn, strict=True)):
        cached_attention(q, k, v, *cache, layer, SCALE, None, 0.0, *PLAN)
    before = CacheState(*(part.clone() for part in state))
    compact_(*state[:8], 1, *PLAN)
    assert state.fill.tolist() == [24, 13]
    assert state.position.tolist() == [32, 13]
    for name in ("keys", "values", "degree"):
        assert torch.equal(getattr(state, name)[1], getattr(before, name)[1])
        assert not torch.equal(getattr(state, name)[0], getattr(before, name)[0])
    assert not state.degree[0, :, :, 24:].any()


def test_attention_itself_advances_no_counter() -> None:
    state = empty_state(1, 8, torch.float32)
    for steps in (1, 3, 50):
        q, k, v = (part[0] for part in random_turn(1, steps, 8, torch.float32, seed=steps))
        cached_attention(q, k, v, *state[:8], 0, SCALE, None, 0.0, *PLAN)
        assert state.fill.tolist() == state.position.tolist() == [0]
        assert not state.degree[:, 1].any(), "the other layer is not touched"


@pytest.mark.parametrize("kernel", [pytest.param("1", marks=needs_kernel), "0"], ids=["kernel", "pytorch"])
def test_a_step_on_a_full_row_is_an_error_and_writes_nothing(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKV_CPU_KERNEL", kernel)
    state = empty_state(2, 8, torch.float32)
    run_ops(state, random_turn(2, 20, 8, torch.float32, seed=0))
    state.fill[1] = CAPACITY  # what compact_ never leaves behind
    before = CacheState(*(part.clone() for part in state))
    q, k, v = (part[0] for part in random_turn(2, 1, 8, torch.float32, seed=1))
    with pytest.raises(RuntimeError, match=r"row 1 .*(no free slot|is full).*32"):
        cached_attention(q, k, v, *state[:8], 0, SCALE, None, 0.0, *PLAN)
    for old, now in zip(before, state, strict=True):
        assert torch.equal(old, now)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 7, 13])
def test_a_later_turn_in_blocks_of_queries_equals_one_block(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    outs, states = [], []
    for block in (3, 512):
        monkeypatch.setattr(ops, "EXTEND_BLOCK", block)
        state, oracle = empty_state(2, 8, torch.float64), CacheRows(SCHEDULE, CAPACITY)
        for length in (40, steps):
            turn = random_turn(2, length, 8, torch.float64, seed=length)
            outs.append(run_ops(state, turn))
            expected = run_oracle(oracle, turn)
        torch.testing.assert_close(outs[-1], expected, rtol=0, atol=TOLERANCE[torch.float64])
        states.append(state)
    for one, other in zip(*states, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("prompt", [32, 33, 64, 200])
def test_a_long_prompt_is_compressed_by_the_rounds_of_the_schedule(prompt: int) -> None:
    state = empty_state(1, 8, torch.float64)
    turn = random_turn(1, prompt, 8, torch.float64, seed=prompt)
    run_ops(state, turn)
    assert (state.fill.item(), state.position.item()) == (SCHEDULE.budget, prompt)
    oracle = CacheRows(SCHEDULE, capacity=10**6)  # holds the whole prompt
    run_oracle(oracle, turn)
    for (_, layer, h), whole in oracle.rows.items():
        row = compress_row(whole, SCHEDULE.rounds(prompt), SCHEDULE)
        torch.testing.assert_close(state.keys[0, layer, h, :24], row.keys, rtol=0, atol=1e-13)
        torch.testing.assert_close(state.values[0, layer, h, :24], row.values, rtol=0, atol=1e-13)
        assert torch.equal(state.degree[0, layer, h, :24], row.degree)
        assert torch.equal(state.keys[0, layer, h, :2], turn.k[layer, 0, h, :2]), "sinks keep their bits"
        assert torch.equal(state.keys[0, layer, h, 20:24], turn.k[layer, 0, h, -4:]), "recents keep their bits"


def test_garbage_past_fill_is_never_read() -> None:
    clean, dirty = empty_state(1, 8, torch.float32), empty_state(1, 8, torch.float32)
    dirty.keys.fill_(float("nan"))
    dirty.values.fill_(float("nan"))
    for step, steps in enumerate([6, *[1] * 30, 40, *[1] * 10]):
        turn = random_turn(1, steps, 8, torch.float32, seed=step)
        assert torch.equal(run_ops(clean, turn), run_ops(dirty, turn))


@pytest.mark.parametrize("steps", [3, 40])
@pytest.mark.parametrize("group", get_args(Group))
def test_padding_is_skipped_bit_for_bit(steps: int, group: Group) -> None:
    """A row behind padding gets and leaves what it does alone; `append_` leaves the same state."""
    shape = CacheShape(LAYERS, KV_HEADS, 3, 8, torch.float32, torch.device("cpu"), 7, LAYERS, KV_HEADS, 8, (0, 1))
    batch, alone, appended = (CacheState.allocate(shape, CAPACITY, 2, CAPACITY) for _ in range(3))
    q, k, v = (part[0] for part in random_turn(2, steps, 8, torch.float32, seed=0))
    pads = torch.tensor([2, 0])
    q[0, :, :2] = k[0, :, :2] = v[0, :, :2] = torch.nan

    def attend(state: CacheState, tokens: Sequence[Tensor], padding: Tensor | None) -> Tensor:
        if group == "window":
            ring = (state.window_keys, state.window_values, state.position, state.active)
            out = window_attention(*tokens, *ring, 1, SCALE, None, 0.0, padding)
        else:
            slots = state.light if group == "light" else state.main
            out = cached_attention(*tokens, *slots, 1, SCALE, None, 0.0, *PLAN, padding)
        compact_(*state.light[:7], None, tokens[0].shape[2], *PLAN, padding)
        compact_(*state.main, tokens[0].shape[2], *PLAN, padding)
        return out

    out = attend(batch, (q, k, v), pads)
    assert not out[0, :, :2].any()
    for b, pad in enumerate(pads.tolist()):
        rows = [part[b : b + 1, :, pad:] for part in (q, k, v)]
        assert torch.equal(attend(alone.row(b), rows, None), out[b : b + 1, :, pad:])
    append_(k, v, *appended, 1, group, *PLAN, pads)
    compact_(*appended.light[:7], None, steps, *PLAN, pads)
    compact_(*appended.main, steps, *PLAN, pads)
    for name, found in batch._asdict().items():
        assert torch.equal(found, getattr(alone, name)), name
        if "queries" not in name:  # which `append_` does not see
            assert torch.equal(found, getattr(appended, name)), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("steps", [1, 3, 40])
def test_a_row_that_is_not_active_is_left_as_it_is(steps: int, dtype: torch.dtype) -> None:
    """The other row goes on as if it were alone, through a compaction."""
    state, alone = empty_state(2, 8, dtype), empty_state(1, 8, dtype)
    run_ops(state, first := random_turn(2, 30, 8, dtype, seed=0))
    run_ops(alone, first.row(0))
    state.active[1] = False
    before = [tensor[1].clone() for tensor in state]
    for seed in range(1, 4):
        turn = random_turn(2, steps, 8, dtype, seed)
        out = run_ops(state, turn)
        assert torch.equal(out[:, :1], run_ops(alone, turn.row(0)))
        assert not out[:, 1].any()
    assert all(torch.equal(tensor[1], old) for tensor, old in zip(state, before, strict=True))
    assert all(torch.equal(tensor[:1], own) for tensor, own in zip(state, alone, strict=True))
