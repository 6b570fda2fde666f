"""The static plan: how many slots each round merges, known from counts alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckv_compile import reference
from ckv_compile.schedule import Schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Schedules that CKVConfig accepts: room for what is protected and for a pair."""
    n_sink, n_recent = draw(st.integers(0, 6)), draw(st.integers(0, 20))
    r_init = draw(st.floats(0.01, 1.0))
    return Schedule(
        budget=n_sink + n_recent + draw(st.integers(2, 200)),
        n_sink=n_sink,
        n_recent=n_recent,
        chunk_size=2 * draw(st.integers(1, 70)),
        r_init=r_init,
        r_decay=draw(st.floats(0.0, 0.3)),
        r_min=draw(st.floats(0.005, r_init)),
    )


@given(schedule=schedules(), extra=st.integers(1, 3000))
def test_rounds_end_exactly_at_the_budget(schedule: Schedule, extra: int) -> None:
    slots = schedule.budget + extra
    plan = schedule.rounds(slots)
    assert len(plan) > 0
    assert slots - sum(plan) == schedule.budget


@given(schedule=schedules(), data=st.data())
def test_a_row_within_the_budget_needs_no_round(schedule: Schedule, data: st.DataObject) -> None:
    assert schedule.rounds(data.draw(st.integers(0, schedule.budget))) == ()


@given(schedule=schedules(), extra=st.integers(1, 3000))
def test_every_round_merges_something_and_at_most_half_of_what_is_unprotected(schedule: Schedule, extra: int) -> None:
    """Half is rounded up: an odd number of unprotected slots has one more in A than in B."""
    slots = schedule.budget + extra
    for merged in schedule.rounds(slots):
        unprotected = slots - schedule.n_sink - schedule.n_recent
        assert 1 <= merged <= schedule.mergeable(slots) <= (unprotected + 1) // 2
        slots -= merged


@given(schedule=schedules(), extra=st.integers(1, 3000))
def test_shares_fall_linearly_to_the_floor(schedule: Schedule, extra: int) -> None:
    slots, plan = schedule.budget + extra, schedule.rounds(schedule.budget + extra)
    for j, merged in enumerate(plan):
        share = max(schedule.r_min, schedule.r_init - j * schedule.r_decay)
        expected = max(1, int(share * schedule.mergeable(slots)))
        if j == len(plan) - 1:
            assert merged <= expected, "the last round merges the remainder"
        else:
            assert merged == expected
        slots -= merged


def test_a_plan_by_hand() -> None:
    # 120 slots, 100 unprotected, 50 in A: 25 go. 95, 75, 38 (the last chunk of 3 has two in A): 0.375 * 38 = 14.
    # 81, 61, 31: 0.25 * 31 = 7. 74, 54, 27: 0.25 * 27 = 6. 68, 48, 24: 6 would go, 4 remain above the budget.
    schedule = Schedule(budget=64, n_sink=4, n_recent=16, chunk_size=8, r_init=0.5, r_decay=0.125, r_min=0.25)
    assert schedule.rounds(120) == (25, 14, 7, 6, 4)


def test_full_rounds_halve_what_is_unprotected() -> None:
    schedule = Schedule(budget=16, n_sink=0, n_recent=0, chunk_size=8, r_init=1.0, r_decay=0.0, r_min=1.0)
    assert schedule.rounds(64) == (32, 16)


@settings(deadline=None)
@given(schedule=schedules(), slots=st.integers(0, 200), seed=st.integers(0, 2**16))
def test_mergeable_is_the_number_of_matches_that_the_reference_finds(schedule: Schedule, slots: int, seed: int) -> None:
    keys = torch.randn(slots, 4, generator=torch.Generator().manual_seed(seed))
    matches = reference.match_row(keys, schedule)
    assert schedule.mergeable(slots) == len(matches)
    assert all(-1.001 < match.similarity < 1.001 for match in matches)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [(0, 0), (5, 0), (6, 0), (7, 1), (8, 2), (9, 2), (10, 2), (11, 3), (13, 4), (14, 4), (15, 5)],
)
def test_mergeable_at_the_edges_of_a_chunk_of_4_with_5_protected(slots: int, expected: int) -> None:
    schedule = Schedule(budget=7, n_sink=2, n_recent=3, chunk_size=4, r_init=0.5, r_decay=0.0, r_min=0.5)
    assert schedule.mergeable(slots) == expected


def test_a_budget_that_cannot_be_reached_is_an_error() -> None:
    schedule = Schedule(budget=5, n_sink=4, n_recent=4, chunk_size=4, r_init=0.5, r_decay=0.0, r_min=0.5)
    with pytest.raises(ValueError, match="9 slots cannot be brought to a budget of 5"):
        schedule.rounds(9)


@given(schedule=schedules(), interval=st.integers(1, 64), slots=st.integers(0, 1000))
def test_settle_is_the_budget_once_no_slot_is_free(schedule: Schedule, interval: int, slots: int) -> None:
    capacity = schedule.budget + interval
    settled = schedule.settle(slots, capacity)
    assert settled == (slots if slots < capacity else schedule.budget)
    assert settled < capacity, "there is always a slot for the next token"
    assert schedule.settle(settled, capacity) == settled
