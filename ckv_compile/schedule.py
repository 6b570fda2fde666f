"""The static plan of compaction: how many slots each round merges, in plain integers.

A plan depends on counts alone, never on data, so the length of the cache after any number of tokens is
known without looking at a device.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Schedule:
    """The integers and ratios that decide every compaction round.

    Args:
        budget: slots per KV head that compaction brings the cache down to.
        n_sink: first slots of a row that are never merged (attention sinks).
        n_recent: last slots of a row that are never merged.
        chunk_size: slots per chunk; even, so that alternating offsets are alternating slots.
        r_init: share of the A slots merged by the first round, in (0, 1].
        r_decay: how much the share falls from one round to the next (paper: r_j = r_init - j * delta_r).
        r_min: the share never falls below this, so that every length reaches the budget.
        n_exact: slots behind the sinks for the tokens that are worth most, which rounds do not merge either.
    """

    budget: int
    n_sink: int
    n_recent: int
    chunk_size: int
    r_init: float
    r_decay: float
    r_min: float
    n_exact: int = 0

    @property
    def n_front(self) -> int:
        """First slots of a row that a round leaves alone: sinks and exact slots."""
        return self.n_sink + self.n_exact

    def mergeable(self, slots: int) -> int:
        """The most slots that one round can merge away from a row of `slots` used slots.

        This is the size of set A: the even offsets of every chunk. A last chunk of a single slot has no B
        to merge into and counts for nothing.
        """
        middle = max(0, slots - self.n_front - self.n_recent)
        in_a = (middle + 1) // 2
        return in_a - 1 if middle % self.chunk_size == 1 else in_a

    def rounds(self, slots: int) -> tuple[int, ...]:
        """Slots merged by each annealed round that brings a row of `slots` slots to `budget`.

        Rounds repeat until the row is within budget; the last one merges exactly the remainder (ours; the
        paper leaves it open).

        Raises:
            ValueError: if a round could merge nothing (the budget is too small for what is protected).
        """
        plan: list[int] = []
        while slots > self.budget:
            mergeable = self.mergeable(slots)
            if mergeable == 0:
                raise ValueError(f"{slots} slots cannot be brought to a budget of {self.budget}: nothing to merge")
            share = max(self.r_min, self.r_init - len(plan) * self.r_decay)
            merged = min(slots - self.budget, max(1, int(share * mergeable)))
            plan.append(merged)
            slots -= merged
        return tuple(plan)

    def settle(self, slots: int, capacity: int) -> int:
        """Used slots of a row that held `slots` at the end of a step: the budget once it has no free slot."""
        return slots if slots < capacity else self.budget


class GroupPlan(NamedTuple):
    """What a group of layers has in common: how it is compacted, and the slots that are allocated per KV head."""

    schedule: Schedule
    capacity: int


class Plans(NamedTuple):
    """The two groups of layers without a sliding window: most layers, and the light ones, which have fewer slots."""

    main: GroupPlan
    light: GroupPlan
