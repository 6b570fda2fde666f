"""The Triton compaction kernels against the reference: run natively on a GPU, or with TRITON_INTERPRET=1 on the CPU.

Which slots merge, and which are exact, must not hang on rounding. So keys are either random, with scores that decide
far enough apart (`reference` and `exchanged` assert that), or of few kinds, with norms and cosines that are exact.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from device import DEVICE
from torch import Tensor

from ckv_compile import clustering, slots
from ckv_compile.errors import ConfigError
from ckv_compile.kernels import compaction
from ckv_compile.reference import ATTENTION_WEIGHT, LAST, Row, attended_slots, merge_row
from ckv_compile.schedule import Schedule

pytestmark = pytest.mark.gpu
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# float32: a sum of a few products, in another order. Narrower: one unit in the last place, since the last rounding may
# fall the other way (and the interpreter cuts bfloat16 off instead of rounding it).
RTOL = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
State = tuple[Tensor, Tensor, Tensor]
Queries = tuple[Tensor, Tensor]


def make_schedule(chunk: int, sink: int = 0, recent: int = 0, budget: int = 1, exact: int = 0) -> Schedule:
    return Schedule(budget, sink, recent, chunk, r_init=0.5, r_decay=0.1, r_min=0.1, n_exact=exact)


def make_rows(rows: int, n: int, dim: int, dtype: str = "fp32", degrees: int = 1, seed: int = 0) -> State:
    """Random keys and values [R, n, D], and degrees [R, n] from 1 to `degrees`."""
    generator = torch.Generator().manual_seed(seed + n + dim)
    keys, values = (torch.randn(rows, n, dim, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    degree = torch.randint(1, degrees + 1, (rows, n), generator=generator).float()
    return keys.to(DEVICE), values.to(DEVICE), degree.to(DEVICE)


def make_signs(rows: int, n: int, seed: int = 0) -> State:
    """Keys of +-1 in 16 columns, of 5 kinds: cosines are multiples of 1/8, and most of them tie."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 2, (rows, 5, 16), generator=generator).float() * 2 - 1
    kind = torch.randint(0, 5, (rows, n, 1), generator=generator).expand(-1, -1, 16)
    values = torch.arange(rows * n * 16.0).reshape(rows, n, 16)
    degree = torch.randint(1, 9, (rows, n), generator=generator).float()
    return kinds.gather(1, kind).to(DEVICE), values.to(DEVICE), degree.to(DEVICE)


def assert_separated(keys: Tensor, merges: int, schedule: Schedule) -> None:
    """No partner, and no m-th most similar pair, is chosen by a difference that rounding could turn around."""
    unit = torch.nn.functional.normalize(keys.double(), dim=-1)
    best = []
    for start in range(schedule.n_front, keys.shape[0] - schedule.n_recent, schedule.chunk_size):
        chunk = unit[start : min(start + schedule.chunk_size, keys.shape[0] - schedule.n_recent)]
        if len(chunk) > 1:
            first, second = (
                torch.cat([chunk[0::2] @ chunk[1::2].T, unit.new_full(((len(chunk) + 1) // 2, 1), -2)], 1)
                .topk(2)
                .values.T
            )
            best += list(zip(first.tolist(), (first - second).tolist(), strict=True))
    best.sort(reverse=True)
    assert min(gap for _, gap in best[:merges]) > 1e-5
    assert merges == len(best) or best[merges - 1][0] - best[merges][0] > 1e-5


def reference(state: State, rounds: tuple[int, ...], schedule: Schedule, separated: bool = True) -> State:
    """The rounds by the oracle, row by row, in float32 and rounded once."""
    out = []
    for keys, values, degree in zip(*state, strict=True):
        row = Row(keys.float().cpu(), values.float().cpu(), degree.cpu())
        for merges in rounds:
            if separated:
                assert_separated(row.keys, merges, schedule)
            row = merge_row(row, merges, schedule)
        out.append(row)
    keys, values, degree = (torch.stack(parts) for parts in zip(*out, strict=True))
    return keys.to(DEVICE, state[0].dtype), values.to(DEVICE, state[1].dtype), degree.to(DEVICE)


def assert_same(actual: State, expected: State) -> None:
    """Equal degrees; keys and values within rounding of the largest number that was added up."""
    assert torch.equal(actual[2], expected[2])
    for got, wanted in zip(actual[:2], expected[:2], strict=True):
        assert got.dtype == wanted.dtype
        rtol = RTOL[got.dtype]
        torch.testing.assert_close(
            got.float(), wanted.float(), rtol=rtol, atol=1e-6 * float(wanted.float().abs().max())
        )


@pytest.mark.parametrize(
    ("n", "chunk", "sink", "recent", "rounds", "dim", "dtype"),
    [
        (70, 128, 0, 0, (1,), 64, "fp32"),  # one short chunk
        (70, 128, 0, 0, (35,), 64, "bf16"),  # every pair merges
        (128, 64, 0, 0, (40,), 32, "fp32"),  # whole chunks
        (133, 128, 4, 0, (64,), 32, "fp32"),  # a last chunk of one slot, which has nobody to join
        (20, 6, 1, 0, (9,), 16, "fp32"),  # the same, small: 3 chunks and one slot
        (37, 6, 2, 3, (10,), 80, "fp32"),  # columns that no tile divides
        (22, 2, 3, 0, (9,), 16, "bf16"),  # a chunk is a pair
        (23, 2, 0, 4, (9,), 16, "fp16"),
        (290, 256, 5, 7, (100,), 32, "bf16"),  # the largest chunk
        (150, 64, 4, 32, (20,), 128, "bf16"),
        (60, 16, 0, 0, (12,), 128, "fp16"),
        (45, 32, 4, 8, (6,), 80, "bf16"),
        (30, 16, 4, 4, (5,), 96, "fp16"),
        (20, 16, 0, 0, (5,), 256, "bf16"),
        (40, 16, 0, 0, (9,), 8, "fp32"),
        (24, 8, 11, 11, (1,), 16, "fp32"),  # nearly everything is protected
        (25, 8, 11, 11, (1,), 16, "fp32"),
        (64, 16, 21, 19, (7,), 16, "fp32"),  # more protected slots than a tile has
        (60, 10, 3, 5, (11, 6, 4, 1), 16, "bf16"),
        (60, 10, 0, 0, (30, 15), 16, "fp16"),
        (50, 16, 2, 2, (8, 8, 3), 16, "fp32"),
    ],
    ids=str,
)
def test_compress_matches_the_reference(
    n: int, chunk: int, sink: int, recent: int, rounds: tuple[int, ...], dim: int, dtype: str
) -> None:
    schedule, state = make_schedule(chunk, sink, recent), make_rows(2, n, dim, dtype, degrees=9)
    actual = compaction.compress(*state, rounds, schedule)
    assert [t.shape for t in actual] == [(2, n - sum(rounds), dim)] * 2 + [(2, n - sum(rounds))]
    assert_same(actual, reference(state, rounds, schedule))
    assert_same(actual, clustering.compress(*state, rounds, schedule))


def test_a_row_longer_than_a_block_of_the_selection() -> None:
    schedule = make_schedule(256, 3, 2)
    for state in (make_rows(1, 2300, 8, degrees=3), make_signs(1, 2300)):  # the second one ties across blocks
        assert_same(compaction.compress(*state, (700,), schedule), clustering.compress(*state, (700,), schedule))


def test_a_plan_of_annealed_rounds() -> None:
    schedule = make_schedule(16, 2, 4, budget=40)
    state = make_rows(2, 70, 16, "bf16")
    rounds = schedule.rounds(70)
    assert len(rounds) > 2
    assert_same(compaction.compress(*state, rounds, schedule), reference(state, rounds, schedule))


def test_no_round_changes_nothing() -> None:
    state = make_rows(1, 9, 8)
    assert all(map(torch.equal, compaction.compress(*state, (), make_schedule(8)), state))


@pytest.mark.parametrize("merges", [1, 5, 11, 16, 24], ids="m{}".format)
@pytest.mark.parametrize("chunk", [16, 64], ids="chunk{}".format)
def test_ties_go_to_the_lower_slot(merges: int, chunk: int) -> None:
    schedule, state = make_schedule(chunk), make_signs(2, 49 if chunk == 16 else 48, seed=merges)
    assert_same(
        compaction.compress(*state, (merges,), schedule), reference(state, (merges,), schedule, separated=False)
    )


@pytest.mark.parametrize("merges", [1, 7, 12])
def test_identical_keys(merges: int) -> None:
    keys, values, degree = make_signs(1, 30)
    state = (keys[:, :1].expand(-1, 30, -1), values, degree)
    schedule = make_schedule(12, 2, 3)
    assert_same(
        compaction.compress(*state, (merges,), schedule), reference(state, (merges,), schedule, separated=False)
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_centroids_of_equal_keys_are_those_keys(dtype: str) -> None:
    keys, values, _ = make_rows(1, 16, 16, dtype)
    keys, values = (t[:, :1].expand(-1, 16, -1) for t in (keys, values))
    merged = compaction.compress(keys, values, torch.full((1, 16), 3.0, device=DEVICE), (8,), make_schedule(16))
    if dtype != "fp32":  # n K is exact, and so is its sum
        assert torch.equal(merged[0], keys[:, :8])
        assert torch.equal(merged[1], values[:, :8])
    assert_same(merged, (keys[:, :8], values[:, :8], torch.tensor([[27.0] + [3.0] * 7], device=DEVICE)))


def test_zero_keys_are_similar_to_nothing() -> None:
    """Their cosine is 0: they merge after the slots of positive similarity and before those of negative."""
    keys, values, degree = make_signs(1, 24)
    keys[:, 4::5] = 0.0
    keys[:, 17] *= -0.0
    state, schedule = (keys, values, degree), make_schedule(8)
    for merges in (3, 8, 12):
        assert_same(
            compaction.compress(*state, (merges,), schedule), reference(state, (merges,), schedule, separated=False)
        )


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e30])
def test_keys_whose_squares_leave_float32_keep_the_count(scale: float) -> None:
    keys, values, degree = make_rows(2, 33, 16, degrees=5)
    out = compaction.compress(keys * scale, values, degree, (16,), make_schedule(8))
    assert all(t.isfinite().all() for t in out)
    assert torch.equal(out[2].sum(1), degree.sum(1))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_degrees_from_one_to_millions(dtype: str) -> None:
    keys, values, _ = make_rows(2, 40, 16, dtype)
    generator = torch.Generator().manual_seed(3)
    degree = (10 ** (6.5 * torch.rand(2, 40, generator=generator))).round().to(DEVICE)
    state, schedule = (keys, values, degree), make_schedule(16, 1, 2)
    actual = compaction.compress(*state, (15,), schedule)
    assert_same(actual, reference(state, (15,), schedule))
    assert torch.equal(actual[2].double().sum(1), degree.double().sum(1))  # below 2 ** 24 every sum is exact
    for got, old in zip(actual[:2], state[:2], strict=True):
        mass = [(t.double() * n.double()[..., None]).sum(1) for t, n in ((got, actual[2]), (old, degree))]
        bound = (old.double().abs() * degree.double()[..., None]).sum(1)  # every term is rounded relative to itself
        assert ((mass[0] - mass[1]).abs() <= RTOL[got.dtype] * bound).all()


def test_many_join_one() -> None:
    """All of A is nearest to the same slot of B, which takes them up in slot order."""
    keys, values, degree = make_rows(1, 64, 16, degrees=4)
    keys[:, 0::2] = keys[:, 41:42] + 0.1 * keys[:, 0::2]
    state, schedule = (keys, values, degree), make_schedule(64)
    actual = compaction.compress(*state, (32,), schedule)
    assert actual[2].max() == degree[0, 0::2].sum() + degree[0, 41]
    assert_same(actual, reference(state, (32,), schedule))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_slot_without_a_merge_keeps_its_bits(dtype: str) -> None:
    keys, values, _ = make_rows(1, 60, 16, dtype)
    values[0, :, 0] = torch.arange(60)  # names the slot
    values[:, :, 1] = -0.0
    values[:, :, 2] = torch.finfo(DTYPES[dtype]).smallest_normal / 4
    degree = torch.full((1, 60), 3.0, device=DEVICE)  # 3 K / 3 need not be K
    out = compaction.compress(keys, values, degree, (6,), make_schedule(32, 3, 4))
    alone = out[2][0] == 3.0
    assert alone.sum() >= 60 - 2 * 6
    slots = out[1][0, alone, 0].long()
    for got, old in zip(out[:2], (keys, values), strict=True):
        assert torch.equal(bits(got[0, alone]), bits(old[0, slots]))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def test_strided_rows() -> None:
    """Keys as a projection leaves them: [S, Hkv, D] in memory."""
    keys, values, degree = make_rows(2, 40, 16)
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (keys, values)]
    schedule = make_schedule(16)
    expected = compaction.compress(keys, values, degree, (9, 4), schedule)
    actual = compaction.compress(*strided, degree, (9, 4), schedule)
    assert all(map(torch.equal, actual, expected))


def test_a_row_has_the_same_bits_in_any_company() -> None:
    state, schedule = make_rows(3, 45, 16, degrees=7), make_schedule(16, 2, 3)
    state[0][1] = make_signs(1, 45)[0]
    together = compaction.compress(*state, (9, 5), schedule)
    assert all(map(torch.equal, together, compaction.compress(*state, (9, 5), schedule)))
    for r in range(3):
        alone = compaction.compress(*(t[r : r + 1] for t in state), (9, 5), schedule)
        assert all(torch.equal(a[0], t[r]) for a, t in zip(alone, together, strict=True))


def make_queries(keys: Tensor, group: int = 2) -> Queries:
    """Queries of some heads for keys [..., n, D]: their means and mean squares, and the last ones."""
    generator, (*rows, _, dim) = torch.Generator().manual_seed(keys.shape[-1]), keys.shape
    mean, deviation = torch.randn(2, *rows, dim, generator=generator) / dim**0.5
    last = torch.randn(*rows, LAST, group, dim, generator=generator) / dim**0.5
    return torch.stack([mean, mean**2 + deviation**2], dim=-2).to(DEVICE), last.to(DEVICE, keys.dtype)


def exchanged(state: State, queries: Queries, schedule: Schedule) -> State:
    """The exchange by the batched form; of both scores, what is chosen has clearly more than what is not."""
    keys, values, degree = state[0].double(), state[1].double(), state[2]
    worth = clustering.worth(keys, values, degree, queries[0].double(), schedule)
    attended = clustering._standard(clustering.attended(keys, degree, queries[1], schedule))
    both, count = worth + ATTENTION_WEIGHT * attended, attended_slots(schedule.n_exact)
    chosen = clustering._best(both, count)
    for scores, number in ((both, count), (worth.masked_fill(chosen, float("-inf")), schedule.n_exact - count)):
        ranked = scores.sort(dim=1, descending=True).values
        assert not number or (ranked[:, number - 1] - ranked[:, number]).min() > 1e-4
    return clustering.exchange(*state, *queries, schedule)


def run_exchange(state: State, queries: Queries, schedule: Schedule) -> State:
    """The exchange alone, on rows [R, n] that are due: each the one head of a batch row."""
    keys, values, degree = (part.clone()[:, None, None] for part in state)
    full = torch.full(degree.shape[:1], degree.shape[3] - 1, device=DEVICE)
    known = (part[:, None, None].contiguous() for part in queries)
    compaction.exchange(keys, values, degree, *known, full, full > 0, schedule)
    return keys[:, 0, 0], values[:, 0, 0], degree[:, 0, 0]


@pytest.mark.parametrize(
    ("n", "sink", "exact", "recent", "dim", "group", "dtype"),
    [
        (40, 2, 6, 4, 16, 2, "fp32"),
        (70, 0, 30, 0, 80, 5, "bf16"),  # more queries than a tile has
        (33, 3, 1, 5, 24, 1, "fp16"),  # none by what queries attend to
        (21, 1, 14, 1, 256, 3, "bf16"),  # more exact slots than others
        (12, 2, 2, 4, 8, 9, "fp32"),  # fewer candidates than a slot has neighbours
        (1100, 4, 560, 32, 8, 1, "fp32"),  # more scores, and more pairs, than are handled at once
    ],
    ids=str,
)
def test_exchange_has_the_bits_of_the_batched_form(
    n: int, sink: int, exact: int, recent: int, dim: int, group: int, dtype: str
) -> None:
    state, schedule = make_rows(2, n, dim, dtype, degrees=9), make_schedule(8, sink, recent, exact=exact)
    queries = make_queries(state[0], group)
    expected = exchanged(state, queries, schedule)
    assert not any(torch.equal(new, old) for new, old in zip(expected[0], state[0], strict=True))
    actual = run_exchange(state, queries, schedule)
    assert all(torch.equal(bits(got), bits(wanted)) for got, wanted in zip(actual, expected, strict=True))


def test_of_slots_that_are_worth_the_same_the_first_are_exact() -> None:
    """32 candidates whose degrees add up to 1024, so that every mean is exact; a degree names its slot.

    All queries attend to a sink, so that degrees do not tell them apart.
    """
    keys = torch.eye(8, device=DEVICE)[:1].expand(1, 37, -1).contiguous()
    last = keys[:, :LAST, None].clone()
    degree = torch.arange(1.0, 38.0, device=DEVICE)[None]
    degree[0, 33] += 1024 - degree[0, 2:34].sum()
    values, queries, schedule = keys.clone(), (make_queries(keys)[0], last), make_schedule(8, 2, 3, exact=9)
    keys[:, 0] *= 1000.0
    assert torch.equal(run_exchange((keys, values, degree), queries, schedule)[2], degree)
    values[:, [6, 9, 13, 17, 22, 30]] *= 4.0  # worth more, and the same; 2, 3 and 4 stay beside them
    order = torch.arange(37, device=DEVICE)
    order[[13, 17, 22, 30, 5, 7, 8, 10]] = order[[5, 7, 8, 10, 13, 17, 22, 30]]
    actual = run_exchange((keys, values, degree), queries, schedule)
    assert torch.equal(actual[2], degree[:, order])
    assert torch.equal(actual[1], values[:, order])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38, 1e-40, 0.0], ids=str)
def test_exchange_keeps_every_slot_whatever_the_numbers(value: float) -> None:
    keys, values, _ = make_rows(2, 33, 16)
    degree = torch.arange(1.0, 34.0, device=DEVICE).expand(2, -1)  # names the slot
    keys[0, 11], values[1, 20:] = value, value
    actual = run_exchange((keys, values, degree), make_queries(keys), make_schedule(8, 2, 3, exact=7))
    assert torch.equal(actual[2].sort().values, degree)
    for row, places in enumerate((actual[2] - 1).long()):
        assert torch.equal(bits(actual[0][row]), bits(keys[row, places]))
        assert torch.equal(bits(actual[1][row]), bits(values[row, places]))


def test_an_exchange_has_the_same_bits_in_any_company() -> None:
    state, schedule = make_rows(3, 45, 16, degrees=7), make_schedule(8, 2, 3, exact=8)
    state[0][1], queries = make_signs(1, 45)[0], make_queries(state[0])
    together = run_exchange(state, queries, schedule)
    for r in range(3):
        own = tuple(part[r : r + 1] for part in queries)
        alone = run_exchange(tuple(part[r : r + 1] for part in state), own, schedule)
        assert all(torch.equal(a[0], t[r]) for a, t in zip(alone, together, strict=True))


def make_cache(fill: list[int], layers: int, heads: int, capacity: int, dim: int, dtype: str) -> State:
    """A cache [B, L, Hkv, C, D] in which the slots from `fill` on are empty and hold NaN."""
    rows = make_rows(len(fill) * layers * heads, capacity, dim, dtype, degrees=6, seed=5)
    shape = (len(fill), layers, heads, capacity)
    keys, values, degree = rows[0].view(*shape, dim), rows[1].view(*shape, dim), rows[2].view(shape)
    for b, used in enumerate(fill):
        keys[b, :, :, used:], values[b, :, :, used:], degree[b, :, :, used:] = float("nan"), float("nan"), 0.0
    return keys, values, degree


def flat_rows(state: State, b: int) -> Iterator[State]:
    for layer in range(state[0].shape[1]):
        yield state[0][b, layer], state[1][b, layer], state[2][b, layer]


@pytest.mark.parametrize(
    ("capacity", "budget", "chunk", "sink", "exact", "recent", "dim", "dtype"),
    [
        (40, 30, 16, 2, 0, 4, 16, "bf16"),
        (40, 39, 16, 0, 0, 0, 16, "fp32"),  # one merge
        (33, 17, 32, 0, 0, 0, 16, "fp16"),  # all of A, and a last chunk of one slot
        (27, 21, 2, 3, 0, 5, 24, "bf16"),
        (70, 60, 128, 4, 0, 8, 80, "bf16"),
        (44, 36, 6, 9, 0, 13, 16, "fp32"),  # more protected slots than a tile has
        (40, 34, 16, 2, 12, 4, 16, "fp32"),
        (51, 44, 8, 3, 25, 5, 80, "bf16"),  # more exact slots than a tile has
    ],
    ids=str,
)
def test_compact_serves_the_rows_that_are_due(
    capacity: int, budget: int, chunk: int, sink: int, exact: int, recent: int, dim: int, dtype: str
) -> None:
    """Side by side: a row that is full, one that is not, a full one that is not active, and another full one."""
    schedule = make_schedule(chunk, sink, recent, budget, exact)
    last = capacity - 1
    cache = make_cache([capacity, 20, capacity, capacity], 2, 2, capacity, dim, dtype)
    before = tuple(t.clone() for t in cache)
    fill = torch.tensor([last, 19, last, last], device=DEVICE)  # the token of this step is in its slot already
    position = torch.tensor([1000, 19, 500, 2**33], device=DEVICE)
    active = torch.tensor([True, True, False, True], device=DEVICE)
    queries = make_queries(cache[0])

    compaction.compact(*cache, *queries, fill, position, active, schedule)

    assert fill.tolist() == [budget, 20, last, budget]
    assert position.tolist() == [1001, 20, 500, 2**33 + 1]
    for b in (1, 2):
        assert all(torch.equal(bits(new[b]), bits(old[b])) for new, old in zip(cache[:2], before[:2], strict=True))
        assert torch.equal(cache[2][b], before[2][b])
    for b in (0, 3):
        known_rows = zip(queries[0][b], queries[1][b], strict=True)
        for new, old, known in zip(flat_rows(cache, b), flat_rows(before, b), known_rows, strict=True):
            chosen = exchanged(old, known, schedule) if exact else old
            expected = reference(chosen, (capacity - budget,), schedule)
            assert_same((new[0][:, :budget], new[1][:, :budget], new[2][:, :budget]), expected)
            assert not new[2][:, budget:].any()


def test_compact_of_some_rows_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 4, 1 and 2 of five, two at once; row 1 is not due and row 2 not active."""
    monkeypatch.setattr(compaction, "_ROWS_AT_ONCE", 2)
    schedule = make_schedule(8, 2, 3, budget=24, exact=8)
    cache = make_cache([33, 20, 33, 33, 33], 2, 2, 33, 16, "fp32")
    fill = torch.tensor([32, 19, 32, 32, 32], device=DEVICE)
    active = torch.tensor([True, True, False, True, True], device=DEVICE)
    other, queries = tuple(part.clone() for part in cache), make_queries(cache[0])
    counters, position = (fill.clone(), fill.clone()), fill.clone()
    rows = torch.tensor([4, 1, 2], device=DEVICE)
    compaction.compact(*cache, *queries, fill, position, active, schedule, rows)
    compaction.compact(*other, *queries, *counters, torch.tensor([0, 1, 0, 0, 1], device=DEVICE).bool(), schedule)
    assert fill.tolist() == counters[0].tolist() == [32, 20, 32, 32, 24]
    assert torch.equal(position, counters[1])
    for ours, theirs in zip(cache, other, strict=True):
        assert torch.equal(bits(ours), bits(theirs))


def test_compact_and_compress_have_the_same_bits() -> None:
    schedule = make_schedule(8, 2, 3, budget=20)
    cache = make_cache([29, 29], 1, 2, 29, 16, "bf16")
    expected = compaction.compress(*(t.flatten(0, 2) for t in cache), (9,), schedule)
    counters = torch.full((2,), 28, device=DEVICE)
    queries, active = make_queries(cache[0]), torch.ones(2, dtype=torch.bool, device=DEVICE)
    compaction.compact(*cache, *queries, counters, counters.clone(), active, schedule)
    for got, wanted in zip(cache, expected, strict=True):
        assert torch.equal(got.flatten(0, 2)[:, :20], wanted)


@pytest.mark.parametrize(
    ("capacity", "budget", "chunk", "sink", "exact", "recent", "dim"),
    [(40, 30, 16, 2, 0, 4, 16), (70, 60, 128, 4, 0, 8, 80), (40, 34, 16, 2, 12, 4, 16), (51, 44, 8, 3, 25, 5, 64)],
    ids=str,
)
def test_compact_of_slots_of_8_bits(
    capacity: int, budget: int, chunk: int, sink: int, exact: int, recent: int, dim: int
) -> None:
    """A row that is full beside one that is not: as the slots would be compacted that these stand for, and rounded."""
    schedule = make_schedule(chunk, sink, recent, budget, exact)
    keys, values, degree = make_cache([capacity, 20], 2, 2, capacity, dim, "fp32")
    (keys, key_step), (values, value_step) = (slots.to_int8(part) for part in (keys, values))
    cache = (keys, values, torch.stack([degree, key_step, value_step], dim=-1))
    before = tuple(t.clone() for t in cache)
    wide = slots.read(*before)
    queries = make_queries(wide[0])
    fill = torch.tensor([capacity - 1, 19], device=DEVICE)
    compaction.compact(*cache, *queries, fill, fill.clone(), fill > 0, schedule)
    assert fill.tolist() == [budget, 20]
    assert all(torch.equal(bits(new[1]), bits(old[1])) for new, old in zip(cache, before, strict=True))
    found = tuple(part[..., :budget, :] if part.ndim == 5 else part[..., :budget] for part in slots.read(*cache))
    known_rows = zip(queries[0][0], queries[1][0], strict=True)
    for new, old, known in zip(flat_rows(found, 0), flat_rows(wide, 0), known_rows, strict=True):
        chosen = exchanged(old, known, schedule) if exact else old
        expected = reference(chosen, (capacity - budget,), schedule)
        assert torch.equal(new[2], expected[2])
        for got, wanted in zip(new[:2], expected[:2], strict=True):
            numbers, step = slots.to_int8(wanted)
            # A merged number between two may be rounded to either; all others are the same.
            assert ((got - slots.from_int8(numbers, step)).abs() <= 1.001 * step[..., None]).all()
            single = new[2] == 1.0
            assert torch.equal(got[single], wanted[single])
            assert ((got - wanted).abs() <= 0.51 * step[..., None]).all()
    assert not cache[2][0, :, :, budget:].any()


@pytest.mark.parametrize("exact", [0, 5], ids="exact{}".format)
def test_a_stream_of_steps_with_repeated_compactions(exact: int) -> None:
    """Rows that start at different fills, take a token a step, and are compacted at different times."""
    capacity, budget, dim = 22 + exact, 16 + exact, 16
    schedule = make_schedule(8, 2, 3, budget, exact)
    used = [n + exact for n in (3, 15, 20)]
    cache = make_cache(used, 2, 1, capacity, dim, "fp32")
    queries = make_queries(cache[0])
    oracle = {
        (b, layer): Row(*(t[b, layer, 0, :n].clone().cpu() for t in cache))
        for b, n in enumerate(used)
        for layer in (0, 1)
    }
    fill, position = torch.tensor(used, device=DEVICE), torch.tensor(used, device=DEVICE)
    active = torch.ones(3, dtype=torch.bool, device=DEVICE)
    generator, compactions = torch.Generator().manual_seed(1), 0
    for step in range(1, 21):
        for (b, layer), row in oracle.items():
            k, v = torch.randn(2, 1, dim, generator=generator)
            slot = int(fill[b])
            cache[0][b, layer, 0, slot], cache[1][b, layer, 0, slot], cache[2][b, layer, 0, slot] = k, v, 1.0
            new = Row(*(torch.cat(pair) for pair in zip(row, (k, v, torch.ones(1)), strict=True)))
            if len(new.degree) == capacity and exact:
                known = tuple(part[b, layer].cpu() for part in queries)
                new = Row(*(part[0] for part in exchanged(tuple(part[None] for part in new), known, schedule)))
            if len(new.degree) == capacity:
                assert_separated(new.keys, capacity - budget, schedule)
                new, compactions = merge_row(new, capacity - budget, schedule), compactions + 1
            oracle[b, layer] = new
        compaction.compact(*cache, *queries, fill, position, active, schedule)
        assert position.tolist() == [n + step for n in used]
        for (b, layer), row in oracle.items():
            slots = int(fill[b])
            assert slots == len(row.degree)
            actual = tuple(t[b, layer, 0, :slots].cpu() for t in cache)
            assert torch.equal(actual[2], row.degree)
            torch.testing.assert_close(actual[:2], row[:2], rtol=1e-5, atol=1e-5)  # rounding of several compactions
            assert not cache[2][b, layer, 0, slots:].any()
    assert compactions >= 2 * (1 + 3 + 3)
    assert torch.equal(cache[2].sum(-1)[:, 0, 0].cpu(), torch.stack([oracle[b, 0].degree.sum() for b in range(3)]))


def test_only_exact_slots_cost_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, launch = [], compaction.launch
    monkeypatch.setattr(
        compaction, "launch", lambda kernel, grid: launched.append(kernel.__name__) or launch(kernel, grid)
    )
    for exact, expected in ((0, []), (3, ["_attend_kernel", "_exchange_kernel"])):
        launched.clear()
        cache = make_cache([9], 1, 1, 20, 16, "fp32")
        before = tuple(part.clone() for part in cache)
        counters, active = torch.tensor([9], device=DEVICE), torch.tensor([True], device=DEVICE)
        schedule = make_schedule(8, 1, 1, budget=16, exact=exact)
        compaction.compact(*cache, *make_queries(cache[0]), counters, counters.clone(), active, schedule)
        assert launched == [*expected, "_match_kernel", "_select_kernel", "_move_kernel"]
        assert all(torch.equal(bits(new), bits(old)) for new, old in zip(cache, before, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    state = make_rows(1, 20, 16)
    with pytest.raises(ConfigError, match=r"chunk_size=258 .* from 2 to 256"):
        compaction.check(torch.float32, 64, make_schedule(258))
    with pytest.raises(ConfigError, match="chunk_size=300"):
        compaction.compress(*state, (3,), make_schedule(300))
    with pytest.raises(ConfigError, match="head size of 12"):
        compaction.compress(*make_rows(1, 20, 12), (3,), make_schedule(8))
    for rounds in ((11,), (0,)):
        with pytest.raises(ValueError, match="offers 1 to 10"):
            compaction.compress(*state, rounds, make_schedule(20))
    with pytest.raises(ConfigError, match="float64"):
        compaction.compress(*(t.double() for t in state), (3,), make_schedule(8))
    cache = make_cache([20], 2, 2, 20, 16, "fp32")
    counters, active = torch.tensor([3], device=DEVICE), torch.tensor([True], device=DEVICE)
    queries, rest = make_queries(cache[0]), (counters, counters.clone(), active)
    with pytest.raises(ValueError, match="contiguous"):
        compaction.compact(cache[0].transpose(1, 2), *cache[1:], *queries, *rest, make_schedule(8, budget=16))
    queries, last = queries
    for wrong in (queries[:, :1], queries.double(), queries.mT.contiguous().mT):
        with pytest.raises(ValueError, match=r"^queries must be contiguous float32 of \(1, 2, 2, 2, 16\)"):
            compaction.compact(*cache, wrong, last, *rest, make_schedule(8, budget=16, exact=3))
    for wrong in (last[:, :1], last[..., :8], last[:, :, :, 1:], last.half(), last.mT.contiguous().mT):
        with pytest.raises(
            ValueError, match=r"^last_queries must be contiguous torch.float32 of \(1, 2, 2, 8, 'G', 16"
        ):
            compaction.compact(*cache, queries, wrong, *rest, make_schedule(8, budget=16, exact=3))
