"""The batched form of chunked soft matching against the oracle, row by row."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ckv_compile import clustering, reference
from ckv_compile.reference import ATTENTION_WEIGHT, LAST, LEAST_ATTENTION, Row
from ckv_compile.schedule import Schedule

# (rows, slots, head dim, chunk size, sinks, recents): one row of chunks, several, a short last chunk, none whole.
SHAPES = [
    (3, 100, 64, 16, 4, 8),
    (3, 100, 64, 128, 4, 8),
    (5, 300, 64, 128, 4, 32),
    (3, 133, 16, 32, 1, 3),
    (8, 40, 4, 8, 2, 2),
    (3, 20, 8, 2, 1, 1),
    (2, 17, 128, 8, 0, 0),
]


def shape_id(shape: tuple[int, ...]) -> str:
    return "R{}-n{}-D{}-c{}-sink{}-recent{}".format(*shape)


def plan(n_sink: int, n_recent: int, chunk_size: int) -> Schedule:
    return Schedule(n_sink + n_recent + 2, n_sink, n_recent, chunk_size, r_init=0.5, r_decay=0.0, r_min=0.5)


def random_rows(rows: int, slots: int, dim: int, seed: int, most: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [R, n, D] in float64 and float32 degrees [R, n] from 1 to `most`."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, rows, slots, dim, dtype=torch.float64, generator=generator)
    return keys, values, torch.randint(1, most + 1, (rows, slots), generator=generator).float()


def tied_keys(rows: int, slots: int, dim: int, kinds: int, seed: int) -> Tensor:
    """[R, n, D] keys that are `kinds` different ones over and over, a fifth of them of norm zero.

    Every entry is plus or minus a power of two and D a power of four, so norms and cosines come out exact in
    any order of summation, and what ties on paper ties in the machine.
    """
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (kinds, dim), generator=generator).double() * 2 - 1
    scale = 2.0 ** torch.randint(-3, 4, (rows, slots, 1), generator=generator)
    zero = torch.rand(rows, slots, 1, generator=generator) < 0.2
    return (signs[torch.randint(0, kinds, (rows, slots), generator=generator)] * scale).masked_fill(zero, 0.0)


def assert_rows_equal(
    actual: tuple[Tensor, Tensor, Tensor], expected: list[Row], rtol: float = 1e-12, atol: float = 1e-12
) -> None:
    for part, name in zip(actual, ("keys", "values", "degree"), strict=True):
        stacked = torch.stack([getattr(row, name) for row in expected])
        torch.testing.assert_close(part.to(stacked.dtype), stacked, rtol=rtol, atol=atol, msg=lambda m, n=name: n + m)


def assert_matches_equal(keys: Tensor, schedule: Schedule) -> None:
    similarity, partner = clustering.match(keys, schedule)
    for r in range(keys.shape[0]):
        found = [
            (schedule.n_sink + 2 * i, schedule.n_sink + 2 * int(partner[r, i]) + 1)
            for i in range(similarity.shape[1])
            if similarity[r, i] > float("-inf")
        ]
        expected = reference.match_row(keys[r], schedule)
        assert found == [(match.a, match.b) for match in expected]
        scores = torch.tensor([match.similarity for match in expected], dtype=keys.dtype)
        torch.testing.assert_close(similarity[r, : len(expected)], scores, rtol=0, atol=1e-14)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[Tensor, Tensor, Tensor], Schedule]:
    """Rows of any shape, with distinct or tied keys; degrees as large as keeps float32 sums of them exact."""
    n_sink, n_recent = draw(st.integers(0, 4)), draw(st.integers(0, 6))
    schedule = plan(n_sink, n_recent, chunk_size=2 * draw(st.integers(1, 20)))
    slots, dim = n_sink + n_recent + draw(st.integers(1, 90)), draw(st.sampled_from([1, 4, 16]))
    rows, seed = draw(st.integers(1, 4)), draw(st.integers(0, 2**16))
    most = min(draw(st.sampled_from([1, 9, 10**6])), 2**24 // (schedule.chunk_size // 2 + 1))
    keys, values, degree = random_rows(rows, slots, dim, seed, most)
    if draw(st.booleans()):
        keys = tied_keys(rows, slots, dim, draw(st.integers(1, 8)), seed)
    return (keys, values, degree), schedule


@settings(deadline=None)
@given(case=cases())
def test_match_equals_the_reference(case: tuple[tuple[Tensor, Tensor, Tensor], Schedule]) -> None:
    (keys, _, _), schedule = case
    if keys.shape[-1] == 1:
        keys = keys.sign()  # one-dimensional cosines are 1 or -1 but for rounding: make the ties exact
    assert_matches_equal(keys, schedule)


@settings(deadline=None)
@given(case=cases(), data=st.data())
def test_merge_equals_the_reference(case: tuple[tuple[Tensor, Tensor, Tensor], Schedule], data: st.DataObject) -> None:
    (keys, values, degree), schedule = case
    if keys.shape[-1] == 1:
        keys = keys.sign()
    merges = data.draw(st.integers(0, schedule.mergeable(keys.shape[1])))
    before = [part.clone() for part in (keys, values, degree)]
    merged = clustering.merge(keys, values, degree, merges, schedule)
    rows = [Row(*row) for row in zip(*before, strict=True)]
    assert_rows_equal(merged, [reference.merge_row(row, merges, schedule) for row in rows])
    for old, kept in zip(before, (keys, values, degree), strict=True):
        assert torch.equal(old, kept), "the inputs are not modified"


@settings(deadline=None, max_examples=50)
@given(
    n_sink=st.integers(0, 4),
    n_recent=st.integers(0, 6),
    half_chunk=st.integers(1, 20),
    slots=st.integers(20, 120),
    dim=st.sampled_from([3, 8]),
    seed=st.integers(0, 2**16),
)
def test_compress_to_a_budget_equals_the_reference(
    n_sink: int, n_recent: int, half_chunk: int, slots: int, dim: int, seed: int
) -> None:
    schedule = plan(n_sink, n_recent, chunk_size=2 * half_chunk)
    keys, values, degree = random_rows(2, slots, dim, seed, most=2**24 // slots)
    rounds = schedule.rounds(slots)
    merged = clustering.compress(keys, values, degree, rounds, schedule)
    rows = [Row(*row) for row in zip(keys, values, degree, strict=True)]
    assert merged[0].shape == (2, schedule.budget, dim)
    assert_rows_equal(merged, [reference.compress_row(row, rounds, schedule) for row in rows], 1e-10, 1e-10)


@pytest.mark.parametrize("last", [1, 2, 3, 7])
@pytest.mark.parametrize("whole", [0, 1, 3])
@pytest.mark.parametrize("keys_are", ["random", "tied"])
def test_a_short_last_chunk_equals_the_reference(last: int, whole: int, keys_are: str) -> None:
    schedule, slots = plan(2, 3, chunk_size=8), 5 + 8 * whole + last
    keys, values, degree = random_rows(3, slots, 16, seed=last + whole)
    if keys_are == "tied":
        keys = tied_keys(3, slots, 16, kinds=3, seed=last + whole)
    assert_matches_equal(keys, schedule)
    for merges in {0, schedule.mergeable(slots) // 2, schedule.mergeable(slots)}:
        merged = clustering.merge(keys, values, degree, merges, schedule)
        rows = [Row(*row) for row in zip(keys, values, degree, strict=True)]
        assert_rows_equal(merged, [reference.merge_row(row, merges, schedule) for row in rows])


@pytest.mark.parametrize("slots", [0, 3, 4, 5, 8, 9, 10])
def test_a_row_of_protected_slots_only_has_no_matches(slots: int) -> None:
    schedule = plan(4, 6, chunk_size=4)
    keys, values, degree = random_rows(2, slots, 3, seed=0)
    similarity, partner = clustering.match(keys, schedule)
    assert similarity.shape == partner.shape == (2, 0)
    for old, new in zip((keys, values, degree), clustering.merge(keys, values, degree, 0, schedule), strict=True):
        assert torch.equal(old, new)


def test_all_slots_of_a_chunk_equal_join_the_first_of_b() -> None:
    keys = torch.ones(1, 6, 4, dtype=torch.float64)
    values = torch.arange(6.0, dtype=torch.float64).repeat(4, 1).T[None].contiguous()
    merged = clustering.merge(keys, values, torch.ones(1, 6), 3, plan(0, 0, chunk_size=6))
    assert merged[2].tolist() == [[4, 1, 1]]  # slots 0, 2 and 4 joined slot 1
    torch.testing.assert_close(merged[1][0, :, 0], torch.tensor([(0 + 1 + 2 + 4) / 4, 3, 5], dtype=torch.float64))


@pytest.mark.parametrize("slots", [20, 90])
def test_zero_keys_merge_without_nan(slots: int) -> None:
    keys, values, degree = random_rows(2, slots, 4, seed=1)
    merged = clustering.compress(torch.zeros_like(keys), values, degree, (5, 4), plan(2, 2, 8))
    assert all(part.isfinite().all() for part in merged)
    assert torch.equal(merged[2].sum(1), degree.sum(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_low_precision_equals_the_float64_reference_to_one_rounding(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The inputs are exact; sums are in float32 and rounded once, so one unit in the last place is the bound."""
    rows, slots, dim, chunk_size, n_sink, n_recent = shape
    schedule = plan(n_sink, n_recent, chunk_size)
    keys, values, degree = random_rows(rows, slots, dim, seed=7)
    keys, values = keys.to(dtype), values.to(dtype)
    rounds = (schedule.mergeable(slots) // 2, 1)
    merged = clustering.compress(keys, values, degree, rounds, schedule)
    assert [part.dtype for part in merged] == [dtype, dtype, torch.float32]
    wide = [Row(*row) for row in zip(keys.double(), values.double(), degree, strict=True)]
    expected = [reference.compress_row(row, rounds, schedule) for row in wide]
    assert_rows_equal(merged, expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys_are", ["distinct", "duplicated"])
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_a_row_has_the_same_bits_alone_and_among_others(
    shape: tuple[int, ...], keys_are: str, dtype: torch.dtype
) -> None:
    rows, slots, dim, chunk_size, n_sink, n_recent = shape
    schedule = plan(n_sink, n_recent, chunk_size)
    keys, values, degree = random_rows(rows, slots, dim, seed=slots)
    if keys_are == "duplicated":  # ties, which the last bit of a similarity would decide
        keys = keys[:, torch.arange(slots) * 7 % max(3, slots // 8)]
    keys, values = keys.to(dtype), values.to(dtype)
    rounds = (schedule.mergeable(slots) // 2, 1)
    together = clustering.compress(keys, values, degree, rounds, schedule)
    for r in range(rows):
        row = slice(r, r + 1)
        alone = clustering.compress(keys[row], values[row], degree[row], rounds, schedule)
        for one, all_of_them in zip(alone, together, strict=True):
            assert torch.equal(one, all_of_them[row])


@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_the_similarity_of_a_row_has_the_same_bits_alone_and_among_others(shape: tuple[int, ...]) -> None:
    rows, slots, dim, chunk_size, n_sink, n_recent = shape
    schedule = plan(n_sink, n_recent, chunk_size)
    keys = random_rows(rows, slots, dim, seed=slots)[0].float()
    together = clustering.match(keys, schedule)
    for r in range(rows):
        for one, all_of_them in zip(clustering.match(keys[r : r + 1], schedule), together, strict=True):
            assert torch.equal(one[0], all_of_them[r])


def test_inputs_of_any_memory_layout() -> None:
    schedule = plan(1, 2, 8)
    keys, values, degree = random_rows(3, 50, 4, seed=8)
    strided = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in (keys, values, degree)]
    assert not strided[0].is_contiguous()
    before = [part.clone() for part in strided]
    expected = clustering.compress(keys, values, degree, (10, 5), schedule)
    for actual, wanted in zip(clustering.compress(*strided, (10, 5), schedule), expected, strict=True):
        assert torch.equal(actual, wanted)
    assert all(torch.equal(old, kept) for old, kept in zip(before, strided, strict=True))


def test_no_round_is_the_identity() -> None:
    rows = random_rows(2, 30, 4, seed=9)
    for old, new in zip(rows, clustering.compress(*rows, (), plan(1, 1, 4)), strict=True):
        assert torch.equal(old, new)


def no_queries(rows: int, dim: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """What is known of the queries of three heads before the first token: [R, 2, D] and [R, LAST, 3, D]."""
    return torch.zeros(rows, 2, dim, dtype=dtype), torch.zeros(rows, LAST, 3, dim, dtype=dtype)


def random_queries(rows: int, dim: int, seed: int, tokens: int = 9) -> tuple[Tensor, Tensor]:
    """Likewise, after some tokens."""
    q = torch.randn(3 * rows, tokens, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    clustering.observe_(*(queries := no_queries(rows, dim)), q + 0.5, scale=0.3, position=seed)
    return queries


@settings(deadline=None)
@given(
    slots=st.integers(12, 70),
    exact=st.integers(1, 9),
    dim=st.sampled_from([1, 3, 8]),
    most=st.sampled_from([1, 9, 10**6]),
    tokens=st.sampled_from([1, 5, 20]),
    seed=st.integers(0, 2**16),
)
def test_exact_slots_equal_the_reference(slots: int, exact: int, dim: int, most: int, tokens: int, seed: int) -> None:
    schedule = dataclasses.replace(plan(2, 1, 8), n_exact=exact)
    rows, queries = random_rows(2, slots, dim, seed, most), random_queries(2, dim, seed, tokens)
    worth = clustering.worth(*rows, queries[0], schedule)
    attended = clustering.attended(rows[0], rows[2], queries[1], schedule)
    for choose in ("set_apart", "exchange"):
        found = getattr(clustering, choose)(*rows, *queries, schedule)
        for r in range(2):
            row, known = Row(*(part[r] for part in rows)), reference.Queries(*queries[0][r], queries[1][r])
            both = [reference.worth_row(row, known, schedule), reference.attended_row(row, known, schedule)]
            torch.testing.assert_close(torch.stack([worth[r], attended[r]]), torch.stack(both), rtol=0, atol=1e-9)
            scores = (both[0] + ATTENTION_WEIGHT * reference.standard(both[1]), both[0])
            if all(bool((each.sort().values.diff() > 1e-8).all()) for each in scores):  # rounding does not decide
                kept = getattr(reference, choose)(row, known, schedule)
                assert all(torch.equal(part[r], mine) for part, mine in zip(found, kept, strict=True))


@pytest.mark.parametrize("choose", ["set_apart", "exchange"])
def test_choosing_exact_slots_moves_whole_slots_of_the_middle_alone(choose: str) -> None:
    schedule = dataclasses.replace(plan(3, 5, 8), n_exact=11)
    rows, queries = random_rows(4, 60, 6, seed=1), random_queries(4, 6, seed=2)
    keys, values, degree = getattr(clustering, choose)(*rows, *queries, schedule)
    best = []
    for r in range(4):
        known = reference.Queries(*queries[0][r], queries[1][r])
        best.append(reference.exact_slots(Row(*(part[r] for part in rows)), known, schedule))
        order = [int((rows[0][r] == key).all(dim=-1).nonzero()) for key in keys[r]]
        assert sorted(order) == list(range(60))
        assert torch.equal(values[r], rows[1][r][order])
        assert torch.equal(degree[r], rows[2][r][order])
        assert order[:3] + order[-5:] == [0, 1, 2, *range(55, 60)]
        assert sorted(order[3:14]) == best[r]
        if choose == "set_apart":
            assert order[3:14] == sorted(order[3:14])
            assert order[14:] == sorted(order[14:])
        else:
            moved = [slot for slot, old in enumerate(order) if slot != old]
            assert all(order[order[slot]] == slot for slot in moved), "in pairs"
            assert all((slot < 14) != (order[slot] < 14) for slot in moved), "each over the end of the front"


def test_of_slots_that_are_all_alike_the_first_are_exact() -> None:
    schedule = dataclasses.replace(plan(2, 3, 8), n_exact=6)
    keys, degree = torch.ones(2, 30, 4), torch.ones(2, 30)
    values = torch.arange(30.0)[None, :, None].sign().expand(2, 30, 4).contiguous()
    queries = no_queries(2, 4, torch.float32)
    for scores in (
        clustering.worth(keys, values, degree, queries[0], schedule),
        clustering.attended(keys, degree, queries[1], schedule),
    ):
        assert bool((scores == scores[:, :1]).all())
    order = clustering.apart_order(keys, values, degree, *queries, schedule)
    assert torch.equal(order, torch.arange(30).expand(2, -1))


def test_what_stands_out_is_worth_most() -> None:
    """A key unlike all others, a value unlike all others, and a key that queries look for."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 80, 8, dtype=torch.float64, generator=generator) * 0.1 + 1.0
    schedule, queries = plan(4, 8, 8), torch.zeros(1, 2, 8, dtype=torch.float64)
    queries[0, 0, 2] = queries[0, 1, 2] = 1.0
    keys[0, 20, 3:] *= -1.0
    values[0, 40] *= -1.0
    keys[0, 60, 2] = 3.0
    worth = clustering.worth(keys, values, torch.ones(1, 80), queries, schedule)[0]
    ordinary = [i for i in range(len(worth)) if all(abs(i + 4 - slot) > 6 for slot in (20, 40, 60))]
    assert float(worth[ordinary].max()) < min(float(worth[slot - 4]) for slot in (20, 40, 60))


def test_what_the_last_queries_attend_to_is_exact_though_it_is_worth_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 80, 8, dtype=torch.float64, generator=generator) * 0.1 + 1.0
    schedule, (queries, last) = dataclasses.replace(plan(4, 8, 8), n_exact=5), no_queries(1, 8)
    values[0, 50] *= 1e-3  # so that nothing is expected of it
    keys[0, 50] += torch.tensor([0.3, -0.3, 0, 0, 0, 0, 0, 0])
    for token, attending in ((0, False), (3, True)):
        last[0, token, 1] = attending * 100 * torch.tensor([1.0, -1.0, 0, 0, 0, 0, 0, 0])
        order = clustering.apart_order(keys, values, torch.ones(1, 80), queries, last, schedule)
        assert (50 in order[0, 4:9]) == attending


def test_slots_that_nobody_attends_to_are_alike_in_every_dtype() -> None:
    keys, last = torch.zeros(1, 20, 2), torch.zeros(1, LAST, 1, 2)
    keys[0, :5, 0], keys[0, 5:12, 0], last[..., 0] = 1.0, torch.linspace(-8.0, -1.0, 7), 1000.0
    for dtype in (torch.float32, torch.float64):
        scores = clustering.attended(keys.to(dtype), torch.ones(1, 20), last, plan(2, 3, 8))[0]
        assert bool((scores[3:] == torch.tensor(LEAST_ATTENTION, dtype=dtype).log()).all())
        assert bool((scores[:3] > 0).all())  # of 8 queries together


@settings(deadline=None, max_examples=30)
@given(turns=st.lists(st.integers(1, 7), min_size=1, max_size=5), seed=st.integers(0, 2**16))
def test_queries_run_on_however_they_come(turns: list[int], seed: int) -> None:
    q = torch.randn(6, sum(turns), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    queries, position = no_queries(2, 5), seed % 11
    for part in q.split(turns, dim=1):
        clustering.observe_(*queries, part, 0.7, position)
        position += part.shape[1]
    for head, (means, last) in enumerate(zip(*queries, strict=True)):
        own = q[3 * head : 3 * head + 3]
        expected = reference.observe(reference.Queries.none(own), own, 0.7, seed % 11)
        torch.testing.assert_close(means, torch.stack(expected[:2]), rtol=0, atol=1e-13)
        assert torch.equal(last, expected.last)
        newest = own[:, -LAST:].transpose(0, 1) * 0.7
        places = [(position - len(newest) + i) % LAST for i in range(len(newest))]
        assert torch.equal(last[places], newest)


def test_without_rounds_a_row_is_left_as_it_is() -> None:
    """Also one of fewer slots than the schedule protects."""
    schedule = Schedule(60, 2, 8, 16, 0.25, 0.01, 0.05, n_exact=40)
    row = (torch.randn(2, 30, 8), torch.randn(2, 30, 8), torch.ones(2, 30))
    for found, expected in zip(clustering.compress(*row, (), schedule), row, strict=True):
        assert torch.equal(found, expected)
