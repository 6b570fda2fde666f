"""The oracle's own truth: numbers worked out by hand, laws that hold for any row, and the paper's claims."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ckv_compile import clustering, reference
from ckv_compile.reference import (
    LAST,
    Queries,
    Row,
    attend_row,
    attended_row,
    attended_slots,
    compress_row,
    exact_slots,
    match_row,
    merge_row,
    observe,
)
from ckv_compile.schedule import Schedule


def plan(n_sink: int = 0, n_recent: int = 0, chunk_size: int = 4, budget: int = 2) -> Schedule:
    return Schedule(budget, n_sink, n_recent, chunk_size, r_init=0.5, r_decay=0.0, r_min=0.5)


def random_row(slots: int, dim: int, seed: int, most: int = 9) -> Row:
    """A float64 row with whole degrees from 1 to `most`."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, slots, dim, dtype=torch.float64, generator=generator)
    return Row(keys, values, torch.randint(1, most + 1, (slots,), generator=generator).double())


def hand_row() -> Row:
    """Slot 0 is a sink, slot 7 is recent; chunks of 4: slots 1 to 4 (A = 1, 3; B = 2, 4) and 5, 6 (A = 5; B = 6)."""
    keys = [[9.0, 9.0], [3.0, 4.0], [4.0, 3.0], [0.0, 2.0], [1.0, 0.0], [5.0, 0.0], [2.0, 0.0], [8.0, 8.0]]
    values = [[7.0], [10.0], [5.0], [4.0], [6.0], [10.0], [0.0], [3.0]]
    degree = [1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 4.0, 1.0]
    return Row(*(torch.tensor(part, dtype=torch.float64) for part in (keys, values, degree)))


HAND = plan(n_sink=1, n_recent=1, chunk_size=4)


def test_matches_by_hand() -> None:
    # cos(1,2) = (3*4 + 4*3) / (5*5) = 0.96, cos(1,4) = 3/5; cos(3,2) = 3/5, cos(3,4) = 0; cos(5,6) = 1.
    matches = match_row(hand_row().keys, HAND)
    assert [(match.a, match.b) for match in matches] == [(1, 2), (3, 2), (5, 6)]
    assert [match.similarity for match in matches] == pytest.approx([0.96, 0.6, 1.0], abs=1e-15)


def test_a_round_of_two_merges_by_hand() -> None:
    # The best two are 5 -> 6 and 1 -> 2.
    # Slot 2: n = 3 + 2 = 5, K = (3 (4,3) + 2 (3,4)) / 5 = (18/5, 17/5), V = (3*5 + 2*10) / 5 = 7.
    # Slot 6: n = 4 + 1 = 5, K = (4 (2,0) + 1 (5,0)) / 5 = (13/5, 0),    V = (4*0 + 1*10) / 5 = 2.
    row = merge_row(hand_row(), 2, HAND)
    keys = [[9.0, 9.0], [3.6, 3.4], [0.0, 2.0], [1.0, 0.0], [2.6, 0.0], [8.0, 8.0]]
    torch.testing.assert_close(row.keys, torch.tensor(keys, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(row.values[:, 0], torch.tensor([7, 7, 4, 6, 2, 3]).double(), rtol=0, atol=1e-15)
    assert row.degree.tolist() == [1, 5, 1, 1, 5, 1]


def test_several_slots_join_one_at_once_by_hand() -> None:
    # Slot 3 joins slot 2 as well: n = 3 + 2 + 1 = 6, K = (3 (4,3) + 2 (3,4) + (0,2)) / 6 = (3, 19/6),
    # V = (3*5 + 2*10 + 4) / 6 = 6.5.
    row = merge_row(hand_row(), 3, HAND)
    keys = [[9.0, 9.0], [3.0, 19 / 6], [1.0, 0.0], [2.6, 0.0], [8.0, 8.0]]
    torch.testing.assert_close(row.keys, torch.tensor(keys, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(row.values[:, 0], torch.tensor([7, 6.5, 6, 2, 3]).double(), rtol=0, atol=1e-15)
    assert row.degree.tolist() == [1, 6, 1, 5, 1]


def test_more_merges_than_matches_is_an_error() -> None:
    with pytest.raises(ValueError, match="4 merges asked for, but a row of 8 slots offers 3"):
        merge_row(hand_row(), 4, HAND)


def test_ties_between_partners_go_to_the_lower_slot() -> None:
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    matches = match_row(keys, plan(chunk_size=6))  # A = 0, 2, 4; B = 1, 3, 5
    assert [(match.a, match.b) for match in matches] == [(0, 3), (2, 1), (4, 3)]


def test_ties_between_matches_go_to_the_lower_slot() -> None:
    keys = torch.ones(8, 2)
    row = Row(keys, torch.arange(8.0)[:, None], torch.ones(8))
    merged = merge_row(row, 2, plan(chunk_size=4))  # 0 and 2 join 1; 4 and 6 would join 5
    assert merged.values[:, 0].tolist() == [1, 3, 4, 5, 6, 7]
    assert merged.degree.tolist() == [3, 1, 1, 1, 1, 1]


def test_a_chunk_never_matches_into_another() -> None:
    keys = torch.eye(8)
    keys[3] = keys[4]  # equal, but on two sides of a border of chunks
    matches = match_row(keys, plan(chunk_size=4))
    assert [(match.a, match.b) for match in matches] == [(0, 1), (2, 1), (4, 5), (6, 5)]
    assert all(match.similarity == 0 for match in matches)


@settings(deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_invariants_of_a_round(data: st.DataObject, seed: int) -> None:
    n_sink, n_recent = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 7))
    schedule = plan(n_sink, n_recent, chunk_size=2 * data.draw(st.integers(1, 9)))
    slots = n_sink + n_recent + data.draw(st.integers(2, 60))
    row = random_row(slots, dim=data.draw(st.sampled_from([1, 3, 8])), seed=seed, most=10**6)
    row.keys[:: data.draw(st.integers(2, 70))] = 0.0
    merges = data.draw(st.integers(0, schedule.mergeable(slots)))
    before = Row(*(part.clone() for part in row))
    merged = merge_row(row, merges, schedule)

    for old, kept in zip(before, row, strict=True):
        assert torch.equal(old, kept), "the row that was given is not modified"
    assert merged.keys.shape[0] == merged.values.shape[0] == merged.degree.shape[0] == slots - merges
    assert all(part.isfinite().all() for part in merged)
    assert merged.degree.sum() == row.degree.sum()
    for whole in (slice(None), slice(n_sink, -n_recent or None)):  # and the unprotected part by itself
        for new, old in ((merged.keys, row.keys), (merged.values, row.values)):
            mass = (merged.degree[:, None] * new)[whole].sum(0)
            expected = (row.degree[:, None] * old)[whole].sum(0)
            torch.testing.assert_close(mass, expected, rtol=1e-12, atol=1e-12 * float(row.degree.sum()))
    for new, old in zip(merged, row, strict=True):
        assert torch.equal(new[:n_sink], old[:n_sink]), "sinks keep their bits"
        assert torch.equal(new[len(new) - n_recent :], old[len(old) - n_recent :]), "recents keep their bits"


def test_no_merge_is_the_identity() -> None:
    row = random_row(30, 4, seed=0)
    for merged in (merge_row(row, 0, plan(2, 3)), compress_row(row, (), plan(2, 3))):
        assert all(torch.equal(new, old) for new, old in zip(merged, row, strict=True))


@pytest.mark.parametrize(("n_sink", "n_recent"), [(0, 0), (5, 0), (0, 5), (4, 4), (10, 0), (0, 10), (5, 5)])
def test_only_slots_between_sinks_and_recents_take_part(n_sink: int, n_recent: int) -> None:
    matches = match_row(random_row(10, 3, seed=1).keys, plan(n_sink, n_recent, chunk_size=6))
    taking_part = {slot for match in matches for slot in (match.a, match.b)}
    assert taking_part <= set(range(n_sink, 10 - n_recent))
    unprotected = 10 - n_sink - n_recent
    assert [match.a for match in matches] == list(range(n_sink, n_sink + unprotected, 2))


def test_survivors_keep_their_order_and_their_bits() -> None:
    row = random_row(41, 6, seed=2)
    schedule = plan(3, 4, chunk_size=10)
    ranked = sorted(match_row(row.keys, schedule), key=lambda match: -match.similarity)[:9]
    gone, joined = {match.a for match in ranked}, {match.b for match in ranked}
    merged = merge_row(row, 9, schedule)
    kept = [slot for slot in range(41) if slot not in gone]
    for place, slot in enumerate(kept):
        if slot in joined:
            assert merged.degree[place] > row.degree[slot]
        else:
            assert all(torch.equal(new[place], old[slot]) for new, old in zip(merged, row, strict=True))


def test_keys_of_norm_zero_have_similarity_zero() -> None:
    keys = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    matches = match_row(keys, plan(chunk_size=4))
    assert [(match.a, match.b, match.similarity) for match in matches] == [(0, 1, 0.0), (2, 1, -1.0), (4, 5, 0.0)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compression_rounds_to_its_dtype_once(dtype: torch.dtype) -> None:
    wide = Row(*(part.float() for part in random_row(64, 8, seed=3)))
    row = Row(wide.keys.to(dtype), wide.values.to(dtype), wide.degree)
    expected = compress_row(Row(row.keys.float(), row.values.float(), row.degree), (12, 8), plan())
    merged = compress_row(row, (12, 8), plan())
    assert torch.equal(merged.keys, expected.keys.to(dtype))
    assert torch.equal(merged.values, expected.values.to(dtype))
    assert torch.equal(merged.degree, expected.degree)


@settings(deadline=None, max_examples=40)
@given(
    runs=st.integers(2, 12),
    chunk_runs=st.integers(1, 5),
    n_sink=st.integers(0, 3),
    n_recent=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)
def test_attention_over_merged_duplicates_is_exact_after_several_rounds(
    runs: int, chunk_runs: int, n_sink: int, n_recent: int, seed: int
) -> None:
    """Runs of 8 equal tokens (distinct from one another) become one slot each in three rounds."""
    distinct = random_row(n_sink + runs + n_recent, 5, seed)
    repeats = torch.tensor([1] * n_sink + [8] * runs + [1] * n_recent)
    row = Row(*(part.repeat_interleave(repeats, 0) for part in distinct))
    schedule = plan(n_sink, n_recent, chunk_size=8 * chunk_runs)
    # A round merges half of each run: of 8 slots 4 remain, then 2, then 1; later chunks hold more runs.
    merged = compress_row(row, (4 * runs, 2 * runs, runs), schedule)
    assert merged.keys.shape[0] == n_sink + runs + n_recent
    q = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(attend_row(q, merged, 0.7), attend_row(q, row, 0.7), rtol=0, atol=1e-12)
    torch.testing.assert_close(merged.degree, distinct.degree * repeats)


def test_attention_by_hand() -> None:
    # Scores 0 and ln 2 with degrees 4 and 1: weights 4 * 1 and 1 * 2, so (4 * 3 + 2 * 9) / 6 = 5.
    log2 = float(torch.tensor(2.0, dtype=torch.float64).log())
    row = Row(torch.tensor([[0.0], [log2]]).double(), torch.tensor([[3.0], [9.0]]).double(), torch.tensor([4.0, 1.0]))
    out = attend_row(torch.tensor([[2.0]]).double(), row, scale=0.5)
    assert out.item() == pytest.approx(5.0, abs=1e-7)


def test_a_slot_of_degree_zero_gets_no_weight() -> None:
    row, q = random_row(9, 4, seed=4), torch.randn(3, 4, dtype=torch.float64)
    row.degree[[2, 8]] = 0.0
    row.keys[2] = 1e6 * q[0]  # the maximum by far, if it counted
    row.values[[2, 8]] = 1e6
    used = Row(*(part[row.degree > 0] for part in row))
    torch.testing.assert_close(attend_row(q, row, 0.5), attend_row(q, used, 0.5), rtol=0, atol=1e-14)


@pytest.mark.parametrize("steps", [1, 2, 17])
def test_causal_tail_is_causal_sdpa(steps: int) -> None:
    row, q = random_row(steps, 4, seed=5, most=1), torch.randn(steps, 4, dtype=torch.float64)
    expected = F.scaled_dot_product_attention(q[None], row.keys[None], row.values[None], is_causal=True, scale=0.3)
    torch.testing.assert_close(attend_row(q, row, 0.3, causal_tail=steps), expected[0], rtol=0, atol=1e-14)


def test_causal_tail_sees_all_of_the_cache_before_it() -> None:
    row, q = random_row(12, 4, seed=6), torch.randn(5, 4, dtype=torch.float64)
    out = attend_row(q, row, 0.3, causal_tail=5)
    for i in range(5):
        seen = Row(*(part[: 8 + i] for part in row))
        torch.testing.assert_close(out[i], attend_row(q[i : i + 1], seen, 0.3)[0], rtol=0, atol=1e-14)


def test_what_the_last_queries_attend_to_by_hand() -> None:
    # Seven queries of zeros attend to slots of degrees 1, 2, 1, 4 with 1/8, 2/8, 1/8, 4/8. That of the last token is
    # log 3 after scaling: weights 1 * 3, 2 * 1, 1 * 9, 4 * 1 of 18.
    keys = torch.tensor([[1.0], [0.0], [2.0], [0.0]], dtype=torch.float64)
    row = Row(keys, keys, torch.tensor([1.0, 2.0, 1.0, 4.0]))
    q = torch.tensor(3.0, dtype=torch.float64).log().view(1, 1, 1)
    queries = observe(Queries.none(q), q / 0.5, 0.5, position=3 * LAST + 5)
    assert queries.last.flatten().nonzero().tolist() == [[5]]
    found = attended_row(row, queries, plan(n_sink=1, n_recent=1))
    expected = torch.tensor([7 * 2 / 8 + 2 / 18, 7 * 1 / 8 + 9 / 18], dtype=torch.float64).log()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_exact_slots_in_two_parts_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of five slots by both scores, the others by what they are worth; of equal ones the first."""
    assert [attended_slots(n) for n in (0, 1, 2, 5, 10)] == [0, 0, 1, 3, 6]
    row = random_row(11, 2, seed=0)
    #                 sink 0, candidates 1, 2, 3, 4, 5, 6, 7, 8, 9, recent 10
    worth = torch.tensor([5.0, 0.0, 9.0, 9.0, 5.0, -9.0, 0.0, 9.0, 5.0]).double()
    attention = torch.tensor([0.0, 0.0, -9.0, -9.0, 0.0, 90.0, 0.0, -9.0, 0.0]).double()  # standard: 6 far above all
    monkeypatch.setattr(reference, "worth_row", lambda *_: worth)
    monkeypatch.setattr(reference, "attended_row", lambda *_: attention)
    monkeypatch.setattr(reference, "standard", lambda scores: scores)
    schedule = dataclasses.replace(plan(n_sink=1, n_recent=1), n_exact=5)
    queries = Queries.none(torch.zeros(1, 1, 2, dtype=torch.float64))
    # With attention 6 (81) comes first, then 1 and 5 (both 5, as 9 has); of the others 3 and 4 (both 9, as 8 has).
    assert exact_slots(row, queries, schedule) == [1, 3, 4, 5, 6]


@pytest.mark.parametrize("turns", [[20], [1] * 20, [3, 9, 8]], ids=str)
def test_the_last_queries_are_those_of_the_last_tokens_however_they_come(turns: list[int]) -> None:
    q = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    queries, position = Queries.none(q), 0
    for part in q.split(turns, dim=1):
        queries, position = observe(queries, part, 0.3, position), position + part.shape[1]
    for token in range(12, 20):
        assert torch.equal(queries.last[token % LAST], (q[:, token].float() * 0.3).to(torch.bfloat16))


def convex_decreasing(length: int, seed: int) -> list[float]:
    """f(0), f(1), ..., f(length - 1): random, strictly decreasing and strictly convex."""
    rng = random.Random(seed)
    drops = itertools.accumulate(rng.uniform(0.01, 1.0) ** 3 for _ in range(length))
    return list(itertools.accumulate(drops, initial=rng.uniform(-1.0, 1.0)))[:length][::-1]


Pair = Callable[[int, int], float]


def bipartitions(length: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every A, B of a chunk with |A| = |B|; |A| = |B| + 1 for an odd length."""
    for a in itertools.combinations(range(length), (length + 1) // 2):
        yield a, tuple(slot for slot in range(length) if slot not in a)


def best_matches(a: tuple[int, ...], b: tuple[int, ...], pair: Pair) -> list[float]:
    """The similarity of each slot of A to its best partner in B, best first: what a round ranks."""
    return sorted((max(pair(i, j) for j in b) for i in a), reverse=True)


def between_the_sets(a: tuple[int, ...], b: tuple[int, ...], pair: Pair) -> float:
    """All similarity between A and B: what is not lost inside a set, where nothing can be matched."""
    return sum(pair(i, j) for i in a for j in b)


@pytest.mark.parametrize("length", range(2, 9))
@pytest.mark.parametrize("seed", range(4))
def test_no_partition_has_better_matches_than_the_alternating_one(length: int, seed: int) -> None:
    """With s(i, j) = f(|i - j|), f decreasing: whatever the number m of merges, its best m matches are the best.

    This is the objective of a round, sum over A of max over B (and of its best m terms). It needs f decreasing
    only: each slot of A has a neighbour in B, so every match is worth f(1), and no match can be worth more. The
    optimum is not unique: A B B A reaches it too. What convexity adds is the next test.
    """
    f = convex_decreasing(length, seed)

    def pair(i: int, j: int) -> float:
        return f[abs(i - j)]

    evens, odds = tuple(range(0, length, 2)), tuple(range(1, length, 2))
    ours = list(itertools.accumulate(best_matches(evens, odds, pair)))
    for a, b in bipartitions(length):
        for m, total in enumerate(itertools.accumulate(best_matches(a, b, pair))):
            assert total <= ours[m] + 1e-12


@pytest.mark.parametrize("length", range(2, 9))
@pytest.mark.parametrize("seed", range(4))
def test_the_alternating_partition_alone_maximises_similarity_between_the_sets(length: int, seed: int) -> None:
    """With f decreasing and convex: the most similarity lies between A and B, the least inside them.

    This is where the paper's claim needs convexity ("highly similar tokens are put in different sets"). For
    strictly convex f only the alternating partition (and, for an even length, A and B exchanged) is optimal.
    """
    f = convex_decreasing(length, seed)

    def pair(i: int, j: int) -> float:
        return f[abs(i - j)]

    evens, odds = tuple(range(0, length, 2)), tuple(range(1, length, 2))
    ours = between_the_sets(evens, odds, pair)
    for a, b in bipartitions(length):
        if {a, b} != {evens, odds}:
            assert between_the_sets(a, b, pair) < ours - 1e-12


def test_without_convexity_another_partition_has_more_similarity_between_the_sets() -> None:
    f = [2.0, 1.0, 1.0, 0.0]  # decreasing, not convex

    def pair(i: int, j: int) -> float:
        return f[abs(i - j)]

    assert between_the_sets((0, 3), (1, 2), pair) > between_the_sets((0, 2), (1, 3), pair)


def similarity_products(slots: int, chunk_size: int, dim: int, rows: int = 2) -> int:
    """Multiply-adds of the similarities that `clustering.match` really takes."""
    with FlopCounterMode(display=False) as counter:
        clustering.match(torch.zeros(rows, slots, dim), plan(chunk_size=chunk_size))
    return counter.get_total_flops() // (2 * rows)


@pytest.mark.parametrize(("slots", "chunk_size", "dim"), [(256, 32, 8), (512, 32, 8), (256, 64, 8), (256, 32, 16)])
def test_cost_is_linear_in_length_chunk_size_and_head_dim(slots: int, chunk_size: int, dim: int) -> None:
    """n/c chunks of c/2 times c/2 products of length d: n c d / 4, the paper's O(ncd)."""
    assert similarity_products(slots, chunk_size, dim) == slots * chunk_size * dim // 4


def test_a_short_last_chunk_costs_no_more_than_its_own_pairs() -> None:
    assert similarity_products(256 + 10, 32, 8) == (256 * 32 + 10 * 10) * 8 // 4


def test_all_pairs_cost_the_square_of_the_length() -> None:
    for slots in (64, 128, 256):
        assert similarity_products(slots, chunk_size=slots, dim=8) == slots**2 * 8 // 4
