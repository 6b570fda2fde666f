"""The Triton kernels of clustering: one round on many rows, out of place (prefill) or in place (decode).

In decode, where a row has exact slots, two launches come first: *attend* says how much the last queries attend to every
slot, and *exchange* lets the slots that are chosen now take the places of those exact ones that no longer are. A round
itself is three launches. *match* finds for every slot of set A its partner
in set B of the same chunk, *select* finds the m most similar pairs of a row and where every slot goes, *move* folds the
chosen A slots into their partners and closes the gaps. Nothing is sorted, nothing waits for the device, and every sum
has a fixed order: a row's bits depend on the row alone.

Sizes are integers of the schedule. The only thing read from the device is, in decode, which batch rows are due.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckv_compile.errors import ConfigError
from ckv_compile.kernels.builds import (
    HEAD_DIMS,
    INT8,
    INTERPRETED,
    POINTERS,
    Build,
    largest_of,
    launch,
    multiprocessors,
    signature,
    step_of,
    whole_numbers,
)
from ckv_compile.reference import (
    ATTENTION_WEIGHT,
    LAST,
    LEAST_ATTENTION,
    LEAST_DEVIATION,
    NEAR,
    QUERY_WEIGHT,
    VALUE_WEIGHT,
    attended_slots,
)
from ckv_compile.schedule import Schedule
from ckv_compile.slots import STORED

MAX_CHUNK = 256
"""Largest chunk: its pairwise similarities have to fit in the registers of one program."""

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)  # least norm, as in clustering.match
_NEAR, _VALUE_WEIGHT, _QUERY_WEIGHT, _ATTENTION_WEIGHT, _LEAST_DEVIATION, _LEAST_ATTENTION = (
    tl.constexpr(NEAR),
    tl.constexpr(VALUE_WEIGHT),
    tl.constexpr(QUERY_WEIGHT),
    tl.constexpr(ATTENTION_WEIGHT),
    tl.constexpr(LEAST_DEVIATION),
    tl.constexpr(LEAST_ATTENTION),
)
_LAST, _STORED, _LOG2_E = tl.constexpr(LAST), tl.constexpr(STORED), tl.constexpr(1.4426950408889634)
_NEVER, _ALWAYS = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # below and above the rank of every number
_END = tl.constexpr(2**30)  # above the key of every member
_QUERIES = 32  # of a tile of the attend kernel: those of four heads
_SCORES = 512  # that the exchange kernel reads at once: more, each with its neighbours, spill
_ROWS_AT_ONCE = 8  # of many: their scratch is what takes memory, and hardly a row of them is due at a time
_PROGRAMS = 4  # per multiprocessor: what it holds at once of these kernels


class Blocks(NamedTuple):
    """Tile sizes and launch options of one specialisation; `builds` and the launchers read the same ones."""

    pairs: int  # slots of A, and of B, of a tile, at least half a chunk; of *exchange*, slots
    d: int  # columns of a head's tile
    num_warps: int
    num_stages: int


def match_blocks(itemsize: int, chunk_size: int) -> Blocks:
    """Return the tiles of the match kernel, which walks the columns of a head `d` at a time."""
    pairs = _pairs(chunk_size)
    if itemsize == 4:  # exact float32 products run on the vector units, whose operands all lie in registers
        return Blocks(pairs, 16, 8 if pairs >= 64 else 4, num_stages=2)
    return Blocks(pairs, 32, 8 if pairs == 128 else 4, num_stages=3)


def move_blocks(head_dim: int, itemsize: int, chunk_size: int) -> Blocks:
    """Return the tiles of the move kernel, which holds the same columns of every slot of a chunk in registers.

    They are few, so that three or four programs share a multiprocessor and keep its memory busy; but all, where slots
    have 8 bits, whose step is that of the whole vector.
    """
    pairs = _pairs(chunk_size)
    if itemsize == 1:
        d = triton.next_power_of_2(head_dim)
        return Blocks(pairs, d, 16 if pairs * d > 8192 else 8, num_stages=1)
    return Blocks(pairs, 32 if itemsize == 2 or head_dim % 32 == 0 else 16, 8 if pairs == 128 else 4, num_stages=1)


def exchange_blocks(head_dim: int) -> Blocks:
    """Return the tiles of the exchange kernel, whose float32 sums of keys and of values take 8 KB each."""
    d = triton.next_power_of_2(head_dim)
    return Blocks(min(128, 2048 // d), d, num_warps=8, num_stages=1)


def attend_blocks(itemsize: int, int8: bool) -> Blocks:
    """Return the tiles of the attend kernel, which walks the columns of a head `d` at a time, as *match* does."""
    if itemsize == 4:
        return Blocks(64, 16, num_warps=8, num_stages=2)
    return Blocks(32, 64, num_warps=4, num_stages=2) if int8 else Blocks(32, 32, num_warps=4, num_stages=3)


def check(dtype: torch.dtype, head_dim: int, schedule: Schedule) -> None:
    """Refuse what the kernels, these and those of attention, have no tiles for.

    Raises:
        ConfigError: for a dtype, a head size or a chunk size.
    """
    if dtype not in POINTERS:
        raise ConfigError(f"a cache of {dtype} does not suit the GPU kernels: use float32, float16 or bfloat16")
    if head_dim % 8 or head_dim > 256:
        raise ConfigError(
            f"a head size of {head_dim} does not suit the GPU kernels, which load 16 bytes at a time: it must be a "
            "multiple of 8, at most 256; run this model on the CPU"
        )
    if schedule.chunk_size > MAX_CHUNK:
        raise ConfigError(
            f"chunk_size={schedule.chunk_size} is too large for the GPU kernels, which compare all slots of a chunk "
            f"with each other in registers: use an even chunk_size from 2 to {MAX_CHUNK} (128 is the default)"
        )


def compact(
    keys: Tensor,
    values: Tensor,
    degree: Tensor,
    queries: Tensor,
    last_queries: Tensor,
    fill: Tensor,
    position: Tensor,
    active: Tensor,
    schedule: Schedule,
    rows: Tensor | None = None,
) -> None:
    """Closes one decode step of all layers, in place: advances the counters, and compacts the rows that are full.

    An active row counts one token more. If that leaves it no free slot, every KV head of it chooses its exact slots
    anew and runs one clustering round that brings it to the budget. Whether that is so is decided on the device; a step
    in which no row is due costs three launches that return at once, or five where there are exact slots. Scratch is a
    few numbers per slot, never a copy of keys or values.

    Args:
        keys: [B, L, Hkv, C, D] contiguous, float32, float16, bfloat16 or int8 (see `slots`); D is a multiple of 8, at
            most 256.
        values: likewise.
        degree: [B, L, Hkv, C] float32, contiguous; with int8 keys and values [B, L, Hkv, C, 3].
        queries: [B, L, Hkv, 2, D] float32, contiguous: the running means of the scaled queries and of their squares,
            read where there are exact slots.
        last_queries: [B, L, Hkv, LAST, G, D] in the dtype of the keys, if that is not int8, contiguous: the last scaled
            queries, likewise.
        fill: [B] int64, contiguous: used slots.
        position: [B] int64, contiguous: tokens seen.
        active: [B] bool, contiguous; the slots and counters of the other rows stay as they are.
        schedule: the budget, what is protected, how many slots are exact, and the chunks.
        rows: [R] int64, contiguous: the batch rows that took a token, no active one twice; None: all.

    Raises:
        ConfigError: if `schedule` or the head size does not suit the kernels.
        ValueError: if one round cannot bring C slots to the budget, or for a dtype or layout that is not as above.
    """
    if rows is not None and len(rows) > _ROWS_AT_ONCE:
        for part in rows.split(_ROWS_AT_ONCE):
            compact(keys, values, degree, queries, last_queries, fill, position, active, schedule, part)
        return
    batch, layers, heads, capacity, dim = keys.shape
    batch = batch if rows is None else len(rows)
    stored = (STORED,) if keys.dtype == torch.int8 else ()
    if stored:
        check(last_queries.dtype, dim, schedule)
    else:
        _check(keys, values, degree, schedule)
    size = _RoundSize.of(capacity, capacity - schedule.budget, dim, schedule)
    if not (keys.is_contiguous() and values.is_contiguous() and degree.is_contiguous()):
        raise ValueError("keys, values and degree must be contiguous: the kernels write to them in place")
    if (degree.shape, degree.dtype, values.dtype) != ((*keys.shape[:4], *stored), torch.float32, keys.dtype):
        raise ValueError(
            f"for {keys.dtype} keys, degree must be float32 of {(*keys.shape[:4], *stored)} and values of their dtype, "
            f"got {degree.dtype} of {tuple(degree.shape)} and {values.dtype}"
        )
    if (fill.dtype, position.dtype, active.dtype) != (torch.int64, torch.int64, torch.bool):
        raise ValueError(f"fill, position must be int64, active bool: {fill.dtype}, {position.dtype}, {active.dtype}")
    heads_of_row, scratch = layers * heads, size.scratch(batch * layers * heads, keys.device)
    due = torch.empty(batch, dtype=torch.int32, device=keys.device)
    old_degree = degree.new_empty(batch, *degree.shape[1:])
    if schedule.n_exact:
        exchange(keys, values, degree, queries, last_queries, fill, active, schedule, rows)
    _match(keys, scratch, (fill, active, due), batch, heads_of_row, size, rows)
    _select(scratch, (degree, old_degree, fill, position, active, due), batch, heads_of_row, size, rows, bool(stored))
    _move((keys, values, old_degree), (keys, values, degree), scratch, due, batch, heads_of_row, size, rows)


def exchange(
    keys: Tensor,
    values: Tensor,
    degree: Tensor,
    queries: Tensor,
    last_queries: Tensor,
    fill: Tensor,
    active: Tensor,
    schedule: Schedule,
    rows: Tensor | None = None,
) -> None:
    """Lets the slots that are worth most take the places of those exact ones that no longer are, in place.

    It serves the rows that the token of this step fills, as `compact` does, and changes nothing else. Exactly `n_exact`
    slots are chosen whatever the numbers: a score that is not a number counts as the least.

    Args:
        keys, values, degree, queries, last_queries, fill, active, rows: as for `compact`.
        schedule: what is protected, and how many slots are exact: at least one.

    Raises:
        ValueError: for `queries` or `last_queries` of another shape, dtype or layout.
    """
    batch, layers, heads, slots, dim = keys.shape
    if queries.shape != (batch, layers, heads, 2, dim) or queries.dtype != torch.float32 or not queries.is_contiguous():
        raise ValueError(
            f"queries must be contiguous float32 of {(batch, layers, heads, 2, dim)}, "
            f"got {queries.dtype} of {tuple(queries.shape)}"
        )
    group, expected = last_queries.shape[-2], (batch, layers, heads, LAST, last_queries.shape[-2], dim)
    int8 = keys.dtype == torch.int8
    dtype = last_queries.dtype if int8 else keys.dtype
    if last_queries.shape != expected or last_queries.dtype != dtype or not last_queries.is_contiguous():
        raise ValueError(
            f"last_queries must be contiguous {dtype} of {(batch, layers, heads, LAST, 'G', dim)}, "
            f"got {last_queries.dtype} of {tuple(last_queries.shape)}"
        )
    batch = batch if rows is None else len(rows)
    heads_of_row, middle = layers * heads, slots - schedule.n_sink - schedule.n_recent
    scores = torch.empty(batch * heads_of_row, 4, middle, dtype=torch.float32, device=keys.device)
    lse = torch.empty(batch * heads_of_row, LAST * group, dtype=torch.float32, device=keys.device)
    rank, plan = torch.empty(2, batch * heads_of_row, middle, dtype=torch.int32, device=keys.device)
    states = fill if rows is None else rows  # either would do where it is not read
    blocks = attend_blocks(last_queries.element_size(), int8)
    launch(_attend_kernel, _grid(heads_of_row, True, keys.device))(
        keys, degree, last_queries, lse, scores, fill, active, states,
        batch, heads_of_row, slots, schedule.n_sink, middle, LAST * group,
        HEAD_DIM=dim, BLOCK_Q=_QUERIES, BLOCK_N=blocks.pairs, BLOCK_D=blocks.d, ROWS=rows is not None, INT8=int8,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip
    blocks = exchange_blocks(dim)
    launch(_exchange_kernel, _grid(heads_of_row, True, keys.device))(
        keys, values, degree, queries, scores, rank, plan, fill, active, states,
        batch, heads_of_row, slots, schedule.n_sink, schedule.n_exact, attended_slots(schedule.n_exact), middle,
        HEAD_DIM=dim, BLOCK_D=blocks.d, BLOCK_N=blocks.pairs, BLOCK=_SCORES, ROWS=rows is not None, INT8=int8,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip


def compress(
    keys: Tensor, values: Tensor, degree: Tensor, rounds: tuple[int, ...], schedule: Schedule
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs clustering rounds that merge `rounds` slots of every row, one after the other.

    The first round reads the tensors as they are and the last one writes their dtype; what passes between rounds is
    float32. So keys and values are widened once and rounded once, and a single round keeps the bits of what it moves.

    Args:
        keys: [R, n, D] float32, float16 or bfloat16; D is a multiple of 8, at most 256.
        values: likewise.
        degree: [R, n] float32, all positive.
        rounds: slots to merge in each round.
        schedule: what is protected, and the chunks.

    Returns:
        keys, values [R, n - sum(rounds), D] and degree [R, n - sum(rounds)], new unless there are no rounds.

    Raises:
        ConfigError: if `schedule` or the head size does not suit the kernels.
        ValueError: if a round asks for more merges than there are pairs, or for a dtype that is not as above.
    """
    rows, slots, dim = keys.shape
    _check(keys, values, degree, schedule)
    state = (keys.contiguous(), values.contiguous(), degree.contiguous())
    for index, merges in enumerate(rounds):
        size = _RoundSize.of(slots, merges, dim, schedule)
        slots -= merges
        dtype = keys.dtype if index == len(rounds) - 1 else torch.float32
        # The state of the round before is freed here, and its memory serves the next: two buffers take turns.
        new = (
            torch.empty(rows, slots, dim, dtype=dtype, device=keys.device),
            torch.empty(rows, slots, dim, dtype=dtype, device=keys.device),
            torch.empty(rows, slots, dtype=torch.float32, device=keys.device),
        )
        scratch = size.scratch(rows, keys.device)
        _match(state[0], scratch, None, 1, rows, size)
        _select(scratch, None, 1, rows, size)
        _move(state, new, scratch, None, 1, rows, size)
        state = new
    return state


class _Scratch(NamedTuple):
    """What the launches of a round tell each other: int32 [R, |A|] each."""

    rank: Tensor  # the similarity of a slot of A to its partner, as an integer of the same order
    partner: Tensor  # its partner, counted in B of its chunk
    plan: Tensor  # 2 * (slots removed before it) + (1 if it is removed itself)


class _RoundSize(NamedTuple):
    """The integers of one round, the same for every row."""

    slots: int
    merges: int
    n_front: int
    middle: int  # slots that may merge
    chunk_size: int
    dim: int

    @classmethod
    def of(cls, slots: int, merges: int, dim: int, schedule: Schedule) -> "_RoundSize":
        """Check a round of `merges` merges on rows of `slots` slots."""
        if not 0 < merges <= schedule.mergeable(slots):
            raise ValueError(
                f"{merges} merges asked for, but a row of {slots} slots offers 1 to {schedule.mergeable(slots)}"
            )
        middle = slots - schedule.n_front - schedule.n_recent
        return cls(slots, merges, schedule.n_front, middle, schedule.chunk_size, dim)

    @property
    def chunks(self) -> int:
        return int(triton.cdiv(self.middle, self.chunk_size))

    @property
    def tiles(self) -> int:
        """Tiles of the move kernel: the front, the chunks and the recent slots, a chunk of slots each."""
        recent = self.slots - self.n_front - self.middle
        return self.chunks + int(triton.cdiv(self.n_front, self.chunk_size) + triton.cdiv(recent, self.chunk_size))

    def scratch(self, rows: int, device: torch.device) -> _Scratch:
        return _Scratch(*torch.empty(3, rows, (self.middle + 1) // 2, dtype=torch.int32, device=device))


def _pairs(chunk_size: int) -> int:
    """Slots of A in a tile that holds a chunk; 16 are the least a tensor core takes."""
    return max(16, int(triton.next_power_of_2(chunk_size // 2)))


def _check(keys: Tensor, values: Tensor, degree: Tensor, schedule: Schedule) -> None:
    check(keys.dtype, keys.shape[-1], schedule)
    if values.dtype != keys.dtype or degree.dtype != torch.float32:
        raise ValueError(
            "keys and values must share one dtype, and degree must be float32, "
            f"got {keys.dtype}, {values.dtype} and {degree.dtype}"
        )


def _grid(items: int, in_place: bool, device: torch.device) -> tuple[int]:
    """One program an item, but in decode no more than the chip holds: if no row is due, they all return at once."""
    return (min(items, _PROGRAMS * multiprocessors(device)) if in_place else items,)


def _match(
    keys: Tensor,
    scratch: _Scratch,
    guard: tuple[Tensor, ...] | None,  # in place: fill, active, due
    batch: int,
    rows: int,
    size: _RoundSize,
    states: Tensor | None = None,  # in place: see `compact`
) -> None:
    blocks, in_place = match_blocks(max(2, keys.element_size()), size.chunk_size), guard is not None
    launch(_match_kernel, _grid(rows * size.chunks, in_place, keys.device))(
        keys, scratch.rank, scratch.partner, *(guard or (scratch.rank,) * 3), _or(states, scratch),
        batch, rows, size.slots, size.n_front, size.middle, size.chunk_size,
        HEAD_DIM=size.dim, BLOCK=blocks.pairs, BLOCK_D=blocks.d, IN_PLACE=in_place, ROWS=states is not None,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip


def _select(
    scratch: _Scratch,
    guard: tuple[Tensor, ...] | None,  # in place: degree, old_degree, fill, position, active, due
    batch: int,
    rows: int,
    size: _RoundSize,
    states: Tensor | None = None,
    int8: bool = False,
) -> None:
    in_place = guard is not None
    launch(_select_kernel, _grid(rows, in_place, scratch.rank.device))(
        scratch.rank, scratch.plan, *(guard or (scratch.rank,) * 6), _or(states, scratch),
        batch, rows, size.slots, size.middle, size.merges,
        BLOCK=_SELECT.pairs, IN_PLACE=in_place, ROWS=states is not None, INT8=int8,
        num_warps=_SELECT.num_warps, num_stages=_SELECT.num_stages,
    )  # fmt: skip


def _move(
    old: tuple[Tensor, Tensor, Tensor],
    new: tuple[Tensor, Tensor, Tensor],
    scratch: _Scratch,
    due: Tensor | None,  # in place
    batch: int,
    rows: int,
    size: _RoundSize,
    states: Tensor | None = None,
) -> None:
    blocks, in_place = move_blocks(size.dim, old[0].element_size(), size.chunk_size), due is not None
    slices = 2 * triton.cdiv(size.dim, blocks.d)  # of keys and of values
    launch(_move_kernel, _grid(rows * slices * (1 if in_place else size.tiles), in_place, old[0].device))(
        *old, *new, scratch.partner, scratch.plan, scratch.plan if due is None else due, _or(states, scratch),
        batch, rows, size.slots, size.n_front, size.middle, size.chunk_size, size.merges,
        HEAD_DIM=size.dim, BLOCK=blocks.pairs, BLOCK_D=blocks.d, IN_PLACE=in_place, ROWS=states is not None,
        INT8=old[0].dtype == torch.int8,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip


def _or(states: Tensor | None, scratch: _Scratch) -> Tensor:
    """What stands for `rows` in a launch that does not read them."""
    return scratch.rank if states is None else states


@triton.jit
def _state(rows_ptr, b, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of the state that row b of the batch is of."""
    return tl.load(rows_ptr + b) if ROWS else b


@triton.jit
def _is_due(fill_ptr, active_ptr, state, slots):  # type: ignore[no-untyped-def]
    """Whether the token of this step leaves an active row of the state no free slot."""
    return (tl.load(active_ptr + state).to(tl.int32) != 0) & (tl.load(fill_ptr + state) + 1 >= slots)


@triton.jit
def _rank(score):  # type: ignore[no-untyped-def]
    """An integer of the same order as a score, which for what is not a number is that of -inf; -0 and 0 tie."""
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats order like integers, once the negative ones are turned around


@triton.jit(
    do_not_specialize=[
        "degree_ptr", "lse_ptr", "scores_ptr", "fill_ptr", "active_ptr", "rows_ptr",
        "batch", "rows", "slots", "n_sink", "middle", "last",
    ]
)  # fmt: skip
def _attend_kernel(  # type: ignore[no-untyped-def]
    keys_ptr, degree_ptr, queries_ptr, lse_ptr, scores_ptr, fill_ptr, active_ptr, rows_ptr,
    batch, rows, slots, n_sink, middle, last,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    INT8: tl.constexpr,
):  # fmt: skip
    """Score the `middle` slots behind the sinks of the rows that are due by how much the `last` last queries attend to
    them (see `reference.attended_row`), a row a program: the fourth score of a slot.

    First comes the softmax of every query over all slots, whose logarithmic sum in base 2 goes through scratch, so that
    all warps must have stored before one of them loads; then what all queries together give to a slot.
    """
    i, j = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_N)
    for b in range(batch):
        state = _state(rows_ptr, b, ROWS)
        if _is_due(fill_ptr, active_ptr, state, slots):
            for item in range(tl.program_id(0), rows, tl.num_programs(0)):
                row, of_batch = (state * rows + item).to(tl.int64), (b * rows + item).to(tl.int64)
                stored: tl.constexpr = _STORED if INT8 else 1
                keys_row, degree_row = keys_ptr + row * slots * HEAD_DIM, degree_ptr + row * slots * stored
                queries_row, lse_row = queries_ptr + row * last * HEAD_DIM, lse_ptr + of_batch * last
                for query in range(0, last, BLOCK_Q):
                    peak, total = tl.full([BLOCK_Q], float("-inf"), tl.float32), tl.zeros([BLOCK_Q], tl.float32)
                    for start in range(0, slots, BLOCK_N):
                        scores = _query_scores(
                            keys_row, degree_row, queries_row, query + i, last, start + j, slots,
                            HEAD_DIM, BLOCK_Q, BLOCK_N, BLOCK_D, INT8,
                        )  # fmt: skip
                        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
                        total = total * tl.exp2(peak - new_peak) + tl.sum(tl.exp2(scores - new_peak[:, None]), axis=1)
                        peak = new_peak
                    tl.store(lse_row + query + i, peak + tl.log2(total), mask=query + i < last)
                tl.debug_barrier()
                for start in range(0, middle, BLOCK_N):
                    attention = tl.zeros([BLOCK_N], tl.float32)
                    for query in range(0, last, BLOCK_Q):
                        scores = _query_scores(
                            keys_row, degree_row, queries_row, query + i, last, n_sink + start + j, slots,
                            HEAD_DIM, BLOCK_Q, BLOCK_N, BLOCK_D, INT8,
                        )  # fmt: skip
                        # What is no query gives no weight.
                        lse = tl.load(lse_row + query + i, mask=query + i < last, other=float("inf"))
                        attention += tl.sum(tl.exp2(scores - lse[:, None]), axis=0)
                    attention = tl.log(tl.maximum(attention, _LEAST_ATTENTION))
                    tl.store(scores_ptr + (of_batch * 4 + 3) * middle + start + j, attention, mask=start + j < middle)


@triton.jit
def _query_scores(  # type: ignore[no-untyped-def]
    keys_ptr, degree_ptr, queries_ptr, query, last, slot, slots,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Scores in base 2 of some queries, which are scaled already, and some slots; -inf for what is no slot."""
    d = tl.arange(0, BLOCK_D)
    product = tl.zeros([BLOCK_Q, BLOCK_N], tl.float32)
    for start in range(0, HEAD_DIM, BLOCK_D):
        in_q, in_n = (query < last)[:, None], (slot < slots)[:, None]
        if HEAD_DIM % BLOCK_D:
            in_q, in_n = in_q & (start + d < HEAD_DIM)[None, :], in_n & (start + d < HEAD_DIM)[None, :]
        q = tl.load(queries_ptr + query[:, None] * HEAD_DIM + (start + d)[None, :], mask=in_q, other=0.0)
        k = tl.load(keys_ptr + slot[:, None] * HEAD_DIM + (start + d)[None, :], mask=in_n, other=0.0)
        if INT8:
            k = k.to(q.dtype)  # whole numbers that are exact in every dtype
        if INTERPRETED:
            q, k = q.to(tl.float32), k.to(tl.float32)
        product = tl.dot(q, tl.trans(k), product, input_precision="ieee")
    stored: tl.constexpr = _STORED if INT8 else 1
    if INT8:
        product = product * tl.load(degree_ptr + slot * stored + 1, mask=slot < slots, other=0.0)[None, :]
    degree = tl.load(degree_ptr + slot * stored, mask=slot < slots, other=0.0)
    return product * _LOG2_E + tl.log2(degree)[None, :]


@triton.jit(
    do_not_specialize=[
        "degree_ptr", "queries_ptr", "scores_ptr", "rank_ptr", "plan_ptr", "fill_ptr", "active_ptr", "rows_ptr",
        "batch", "rows", "slots", "n_sink", "n_exact", "n_attended", "middle",
    ]
)  # fmt: skip
def _exchange_kernel(  # type: ignore[no-untyped-def]
    keys_ptr, values_ptr, degree_ptr, queries_ptr, scores_ptr, rank_ptr, plan_ptr, fill_ptr, active_ptr, rows_ptr,
    batch, rows, slots, n_sink, n_exact, n_attended, middle,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    INT8: tl.constexpr,
):  # fmt: skip
    """Choose the exact slots of the rows that are due anew, a row a program.

    The `middle` slots behind the sinks are candidates; the first `n_exact` of them are the exact ones so far. What a
    step of the work tells the next goes through scratch, so that all warps must have stored before one of them loads.
    """
    for b in range(batch):
        state = _state(rows_ptr, b, ROWS)
        if _is_due(fill_ptr, active_ptr, state, slots):
            for item in range(tl.program_id(0), rows, tl.num_programs(0)):
                row, of_batch = (state * rows + item).to(tl.int64), (b * rows + item).to(tl.int64)
                stored: tl.constexpr = _STORED if INT8 else 1
                first = row * slots + n_sink
                degree_row = degree_ptr + first * stored
                keys_row, values_row = keys_ptr + first * HEAD_DIM, values_ptr + first * HEAD_DIM
                rank_row, plan_row = rank_ptr + of_batch * middle, plan_ptr + of_batch * middle
                scores_row = scores_ptr + of_batch * 4 * middle
                _rank_worth(
                    keys_row, values_row, degree_row, queries_ptr + row * 2 * HEAD_DIM,
                    scores_row, rank_row, middle, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK, INT8,
                )  # fmt: skip
                tl.debug_barrier()
                _select_row(rank_row, plan_row, middle, n_attended, BLOCK)
                tl.debug_barrier()
                _rank_others(scores_row + 2 * middle, plan_row, rank_row, middle, BLOCK)
                tl.debug_barrier()
                _select_row(rank_row, plan_row, middle, n_exact, BLOCK)
                tl.debug_barrier()
                pairs = _pair_off(plan_row, rank_row, middle, n_exact, BLOCK)  # the ranks have served
                tl.debug_barrier()
                _swap(
                    keys_row, values_row, degree_row, rank_row, pairs, n_exact, HEAD_DIM, BLOCK_D, BLOCK_N, INT8
                )  # fmt: skip


@triton.jit
def _rank_worth(  # type: ignore[no-untyped-def]
    keys_ptr, values_ptr, degree_ptr, queries_ptr, scores_ptr, rank_ptr, n,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Rank n slots by what they are worth (see `reference.worth_row`) and how much queries attend to them.

    `scores` has four numbers a slot: the last is what *attend* found, and the third becomes what the slot is worth.
    """
    stored: tl.constexpr = _STORED if INT8 else 1
    i, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    in_d = d < HEAD_DIM
    mean = tl.load(queries_ptr + d, mask=in_d, other=0.0)
    half_variance = (tl.load(queries_ptr + HEAD_DIM + d, mask=in_d, other=0.0) - mean * mean) / 2
    sum_k, sum_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for start in range(0, n, BLOCK_N):
        in_n = start + i < n
        k, size_k = _load_slots(keys_ptr, degree_ptr, 1, start + i, in_n, HEAD_DIM, BLOCK_D, INT8)
        v, size_v = _load_slots(values_ptr, degree_ptr, 2, start + i, in_n, HEAD_DIM, BLOCK_D, INT8)
        degree = tl.load(degree_ptr + (start + i) * stored, mask=in_n, other=0.0)[:, None]
        expected = tl.sum(k * mean[None, :] + k * k * half_variance[None, :], axis=1) + tl.log(size_v)
        tl.store(scores_ptr + 2 * n + start + i, expected, mask=in_n)
        sum_k += k * (1.0 / size_k)[:, None] * degree
        sum_v += v * (1.0 / size_v)[:, None] * degree
    direction_k, direction_v = _direction(sum_k), _direction(sum_v)
    for start in range(0, n, BLOCK_N):
        in_n = start + i < n
        k, size_k = _load_slots(keys_ptr, degree_ptr, 1, start + i, in_n, HEAD_DIM, BLOCK_D, INT8)
        v, size_v = _load_slots(values_ptr, degree_ptr, 2, start + i, in_n, HEAD_DIM, BLOCK_D, INT8)
        tl.store(scores_ptr + start + i, -tl.sum(k * direction_k[None, :], axis=1) / size_k, mask=in_n)
        tl.store(scores_ptr + n + start + i, -tl.sum(v * direction_v[None, :], axis=1) / size_v, mask=in_n)

    tl.debug_barrier()
    mean_k, deviation_k = _moments(scores_ptr, n, BLOCK)
    mean_v, deviation_v = _moments(scores_ptr + n, n, BLOCK)
    mean_e, deviation_e = _moments(scores_ptr + 2 * n, n, BLOCK)
    mean_a, deviation_a = _moments(scores_ptr + 3 * n, n, BLOCK)
    j = tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        around, count = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for step in range(_NEAR):
            near = start + j + step - _NEAR // 2
            there = (near >= 0) & (near < n)
            unlike_k = (tl.load(scores_ptr + near, mask=there, other=0.0) - mean_k) / deviation_k
            unlike_v = (tl.load(scores_ptr + n + near, mask=there, other=0.0) - mean_v) / deviation_v
            around += tl.where(there, unlike_k + _VALUE_WEIGHT * unlike_v, 0.0)
            count += there.to(tl.float32)
        in_n = start + j < n
        expected = (tl.load(scores_ptr + 2 * n + start + j, mask=in_n, other=0.0) - mean_e) / deviation_e
        worth = around / tl.where(in_n, count, 1.0) + _QUERY_WEIGHT * expected
        attended = (tl.load(scores_ptr + 3 * n + start + j, mask=in_n, other=0.0) - mean_a) / deviation_a
        tl.store(scores_ptr + 2 * n + start + j, worth, mask=in_n)
        tl.store(rank_ptr + start + j, _rank(worth + _ATTENTION_WEIGHT * attended), mask=in_n)


@triton.jit
def _rank_others(worth_ptr, plan_ptr, rank_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rank n slots by what they are worth, those that are chosen already above all others."""
    for start in range(0, n, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        chosen = (tl.load(plan_ptr + slot, mask=slot < n, other=0) & 1) == 1
        worth = tl.load(worth_ptr + slot, mask=slot < n, other=0.0)
        tl.store(rank_ptr + slot, tl.where(chosen, _ALWAYS, _rank(worth)), mask=slot < n)


@triton.jit
def _load_slots(  # type: ignore[no-untyped-def]
    vectors_ptr, degree_ptr, place, slot, mask,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """The vectors of some slots in float32, and their norms; steps stand at a place beside the degree."""
    d = tl.arange(0, BLOCK_D)
    in_d = mask[:, None]
    if HEAD_DIM != BLOCK_D:
        in_d = in_d & (d < HEAD_DIM)[None, :]
    wide = tl.load(vectors_ptr + slot[:, None] * HEAD_DIM + d[None, :], mask=in_d, other=0.0).to(tl.float32)
    if INT8:
        wide = wide * tl.load(degree_ptr + slot * _STORED + place, mask=mask, other=0.0)[:, None]
    return wide, tl.maximum(tl.sqrt(tl.sum(wide * wide, axis=1)), _TINY)


@triton.jit
def _direction(parts):  # type: ignore[no-untyped-def]
    """The sum of vectors [N, D] brought to length 1."""
    total = tl.sum(parts, axis=0)
    return total / tl.maximum(tl.sqrt(tl.sum(total * total)), _TINY)


@triton.jit
def _moments(scores_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The mean of n scores and their deviation, which is never less than LEAST_DEVIATION."""
    i = tl.arange(0, BLOCK)
    total, square = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        total += tl.load(scores_ptr + start + i, mask=start + i < n, other=0.0)
    mean = tl.sum(total) / n
    for start in range(0, n, BLOCK):
        centred = tl.load(scores_ptr + start + i, mask=start + i < n, other=0.0) - mean
        square += tl.where(start + i < n, centred * centred, 0.0)
    return mean, tl.maximum(tl.sqrt(tl.sum(square) / n), _LEAST_DEVIATION)


@triton.jit
def _pair_off(plan_ptr, pairs_ptr, n, n_exact, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """List the slots that become exact from place 0 on and those that no longer are from place `n_exact` on.

    Both are in slot order, and as many: the number is returned.
    """
    stay = tl.load(plan_ptr + n_exact) >> 1  # chosen ones before the first slot that was not exact
    for start in range(0, n, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        plan = tl.load(plan_ptr + slot, mask=slot < n, other=0)
        chosen, before = (plan & 1) == 1, plan >> 1
        tl.store(pairs_ptr + before - stay, slot, mask=(slot >= n_exact) & chosen)
        tl.store(pairs_ptr + n_exact + slot - before, slot, mask=(slot < n_exact) & (chosen == 0))
    return n_exact - stay


@triton.jit
def _swap(  # type: ignore[no-untyped-def]
    keys_ptr, values_ptr, degree_ptr, pairs_ptr, pairs, n_exact,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Let the two slots of every pair change places."""
    stored: tl.constexpr = _STORED if INT8 else 1
    d = tl.arange(0, BLOCK_D)
    for start in range(0, pairs, BLOCK_N):
        pair = start + tl.arange(0, BLOCK_N)
        in_n = pair < pairs
        a = tl.load(pairs_ptr + pair, mask=in_n, other=0)
        b = tl.load(pairs_ptr + n_exact + pair, mask=in_n, other=0)
        mask = in_n[:, None]
        if HEAD_DIM != BLOCK_D:
            mask = mask & (d < HEAD_DIM)[None, :]
        at_a, at_b = a[:, None] * HEAD_DIM + d[None, :], b[:, None] * HEAD_DIM + d[None, :]
        key_a, key_b = tl.load(keys_ptr + at_a, mask=mask), tl.load(keys_ptr + at_b, mask=mask)
        value_a, value_b = tl.load(values_ptr + at_a, mask=mask), tl.load(values_ptr + at_b, mask=mask)
        degree_a, degree_b = tl.load(degree_ptr + a * stored, mask=in_n), tl.load(degree_ptr + b * stored, mask=in_n)
        if INT8:
            k_step_a = tl.load(degree_ptr + a * stored + 1, mask=in_n)
            k_step_b = tl.load(degree_ptr + b * stored + 1, mask=in_n)
            v_step_a = tl.load(degree_ptr + a * stored + 2, mask=in_n)
            v_step_b = tl.load(degree_ptr + b * stored + 2, mask=in_n)
        tl.debug_barrier()  # a slot is loaded before another warp stores to it
        tl.store(keys_ptr + at_a, key_b, mask=mask)
        tl.store(keys_ptr + at_b, key_a, mask=mask)
        tl.store(values_ptr + at_a, value_b, mask=mask)
        tl.store(values_ptr + at_b, value_a, mask=mask)
        tl.store(degree_ptr + a * stored, degree_b, mask=in_n)
        tl.store(degree_ptr + b * stored, degree_a, mask=in_n)
        if INT8:
            tl.store(degree_ptr + a * stored + 1, k_step_b, mask=in_n)
            tl.store(degree_ptr + b * stored + 1, k_step_a, mask=in_n)
            tl.store(degree_ptr + a * stored + 2, v_step_b, mask=in_n)
            tl.store(degree_ptr + b * stored + 2, v_step_a, mask=in_n)


@triton.jit(
    do_not_specialize=[
        "rank_ptr", "partner_ptr", "fill_ptr", "active_ptr", "due_ptr", "rows_ptr",
        "batch", "rows", "slots", "n_front", "middle", "chunk_size",
    ]
)  # fmt: skip
def _match_kernel(  # type: ignore[no-untyped-def]
    keys_ptr, rank_ptr, partner_ptr, fill_ptr, active_ptr, due_ptr, rows_ptr,
    batch, rows, slots, n_front, middle, chunk_size,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, IN_PLACE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Find the partner of every slot of A, a chunk at a time; in place, decide which of the batch rows are due.

    Every program decides that for itself from `fill`, which this launch only reads. Program 0 writes the answer down
    for the launches to come, because the next one advances `fill`.
    """
    first, chunks = tl.program_id(0), tl.cdiv(middle, chunk_size)
    if IN_PLACE:
        for b in range(batch):
            state = _state(rows_ptr, b, ROWS)
            due = _is_due(fill_ptr, active_ptr, state, slots)
            if first == 0:
                tl.store(due_ptr + b, due.to(tl.int32))
            if due:
                for item in range(first, rows * chunks, tl.num_programs(0)):
                    _match_chunk(
                        keys_ptr, rank_ptr, partner_ptr,
                        state * rows + item // chunks, b * rows + item // chunks, item % chunks,
                        slots, n_front, middle, chunk_size, HEAD_DIM, BLOCK, BLOCK_D,
                    )  # fmt: skip
    else:
        _match_chunk(
            keys_ptr, rank_ptr, partner_ptr, first // chunks, first // chunks, first % chunks,
            slots, n_front, middle, chunk_size, HEAD_DIM, BLOCK, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _match_chunk(  # type: ignore[no-untyped-def]
    keys_ptr, rank_ptr, partner_ptr, row, of_batch, chunk, slots, n_front, middle, chunk_size,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Match the slots of a chunk. The product of two bfloat16 or float16 numbers is exact, and the sum is float32.

    Cosines do not depend on the steps of keys of 8 bits, whose whole numbers are exact in bfloat16; so what is no
    number shows in none of them.

    The keys are those of `row` of the state, and what is found is that of row `of_batch`.
    """
    row = row.to(tl.int64)
    start = n_front + chunk * chunk_size
    stop = tl.minimum(start + chunk_size, n_front + middle)
    keys_ptr += row * slots * HEAD_DIM
    first_a = of_batch.to(tl.int64) * ((middle + 1) // 2) + chunk * (chunk_size // 2)
    i, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    a, b = start + 2 * i, start + 2 * i + 1
    in_a, in_b = a < stop, b < stop
    product = tl.zeros([BLOCK, BLOCK], tl.float32)
    square_a, square_b = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start_d in range(0, HEAD_DIM, BLOCK_D):
        mask_a, mask_b = in_a[:, None], in_b[:, None]
        if HEAD_DIM % BLOCK_D:
            mask_a, mask_b = mask_a & (start_d + d < HEAD_DIM)[None, :], mask_b & (start_d + d < HEAD_DIM)[None, :]
        tile_a = tl.load(keys_ptr + a[:, None] * HEAD_DIM + (start_d + d)[None, :], mask=mask_a, other=0.0)
        tile_b = tl.load(keys_ptr + b[:, None] * HEAD_DIM + (start_d + d)[None, :], mask=mask_b, other=0.0)
        wide_a, wide_b = tile_a.to(tl.float32), tile_b.to(tl.float32)
        square_a += tl.sum(wide_a * wide_a, axis=1)
        square_b += tl.sum(wide_b * wide_b, axis=1)
        if keys_ptr.dtype.element_ty == tl.int8:
            tile_a, tile_b = wide_a.to(tl.bfloat16), wide_b.to(tl.bfloat16)
        if INTERPRETED:
            tile_a, tile_b = wide_a, wide_b
        product = tl.dot(tile_a, tl.trans(tile_b), product, input_precision="ieee")
    inverse_a = 1.0 / tl.maximum(tl.sqrt(square_a), _TINY)
    inverse_b = 1.0 / tl.maximum(tl.sqrt(square_b), _TINY)
    # What is not a number (keys that overflow when squared) merges last: a rank must order, and a partner must exist.
    product = product * inverse_b[None, :]
    product = tl.where(in_b[None, :] & (product == product), product, float("-inf"))
    best, partner = tl.max(product, axis=1, return_indices=True, return_indices_tie_break_left=True)
    tl.store(rank_ptr + first_a + i, _rank(best * inverse_a), mask=in_a)
    tl.store(partner_ptr + first_a + i, partner, mask=in_a)


@triton.jit(
    do_not_specialize=[
        "rank_ptr", "plan_ptr", "degree_ptr", "old_degree_ptr", "fill_ptr", "position_ptr", "active_ptr", "due_ptr",
        "rows_ptr", "batch", "rows", "slots", "middle", "merges",
    ]
)  # fmt: skip
def _select_kernel(  # type: ignore[no-untyped-def]
    rank_ptr, plan_ptr, degree_ptr, old_degree_ptr, fill_ptr, position_ptr, active_ptr, due_ptr, rows_ptr,
    batch, rows, slots, middle, merges,
    BLOCK: tl.constexpr, IN_PLACE: tl.constexpr, ROWS: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Choose the m most similar pairs of a row, a row a program; in place, advance the counters of the batch rows.

    Only program 0 touches `fill` and `position`: the others read what the launch before has written down. The degrees
    are set aside here too, because the next launch replaces them while its programs still read them.
    """
    first, n_a = tl.program_id(0), (middle + 1) // 2
    if IN_PLACE:
        for b in range(batch):
            due = tl.load(due_ptr + b) != 0
            state = _state(rows_ptr, b, ROWS)
            if (first == 0) & (tl.load(active_ptr + state).to(tl.int32) != 0):
                tl.store(position_ptr + state, tl.load(position_ptr + state) + 1)
                tl.store(fill_ptr + state, tl.where(due, slots - merges, tl.load(fill_ptr + state) + 1))
            if due:
                for item in range(first, rows, tl.num_programs(0)):
                    row, of_batch = (state * rows + item).to(tl.int64), (b * rows + item).to(tl.int64)
                    _select_row(rank_ptr + of_batch * n_a, plan_ptr + of_batch * n_a, n_a, merges, BLOCK)
                    stored: tl.constexpr = _STORED if INT8 else 1
                    numbers = slots * stored
                    for start in range(0, numbers, BLOCK):
                        number = start + tl.arange(0, BLOCK)
                        old = tl.load(degree_ptr + row * numbers + number, mask=number < numbers, other=0.0)
                        tl.store(old_degree_ptr + of_batch * numbers + number, old, mask=number < numbers)
    else:
        row = first.to(tl.int64)
        _select_row(rank_ptr + row * n_a, plan_ptr + row * n_a, n_a, merges, BLOCK)


@triton.jit
def _select_row(rank_ptr, plan_ptr, n, chosen, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Choose the highest of n ranks: bisect the lowest that is chosen bit by bit; of those that tie the first ones.

    The plan of each is 2 * (chosen ones before it) + (1 if it is chosen itself).
    """
    i = tl.arange(0, BLOCK)
    threshold = tl.full([], _NEVER, tl.int32)
    for step in range(32):
        candidate = threshold ^ (tl.full([], 1, tl.int32) << (31 - step))
        count = tl.zeros([BLOCK], tl.int32)
        for start in range(0, n, BLOCK):
            rank = tl.load(rank_ptr + start + i, mask=start + i < n, other=_NEVER)
            count += (rank >= candidate).to(tl.int32)
        threshold = tl.where(tl.sum(count) >= chosen, candidate, threshold)

    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        rank = tl.load(rank_ptr + start + i, mask=start + i < n, other=_NEVER)
        count += (rank > threshold).to(tl.int32)
    ties_taken = chosen - tl.sum(count)

    above_before, ties_before = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, n, BLOCK):
        rank = tl.load(rank_ptr + start + i, mask=start + i < n, other=_NEVER)
        above, tie = (rank > threshold).to(tl.int32), (rank == threshold).to(tl.int32)
        ties = ties_before + tl.cumsum(tie) - tie  # before each
        before = above_before + tl.cumsum(above) - above + tl.minimum(ties, ties_taken)
        taken = above | (tie & (ties < ties_taken).to(tl.int32))
        tl.store(plan_ptr + start + i, 2 * before + taken, mask=start + i < n)
        above_before += tl.sum(above)
        ties_before += tl.sum(tie)


@triton.jit(
    do_not_specialize=[
        "old_degree_ptr", "degree_ptr", "partner_ptr", "plan_ptr", "due_ptr", "rows_ptr",
        "batch", "rows", "slots", "n_front", "middle", "chunk_size", "merges",
    ]
)  # fmt: skip
def _move_kernel(  # type: ignore[no-untyped-def]
    old_keys_ptr, old_values_ptr, old_degree_ptr, keys_ptr, values_ptr, degree_ptr, partner_ptr, plan_ptr, due_ptr,
    rows_ptr, batch, rows, slots, n_front, middle, chunk_size, merges,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, IN_PLACE: tl.constexpr, ROWS: tl.constexpr,
    INT8: tl.constexpr,
):  # fmt: skip
    """Move the slots that stay to their new places, a slice of the columns of keys or of values a program.

    A row is cut into tiles: its front, its chunks and its recent slots. Out of place every tile has its own program.
    In place one program walks the tiles from left to right (the front stays), because a slot never moves to the right:
    what it writes for a tile lies left of the end of that tile, so left of all that it has yet to read. Programs of
    other slices touch other columns. The degrees have one writer, and all read the copy of the old ones.
    """
    first, slices = tl.program_id(0), 2 * tl.cdiv(HEAD_DIM, BLOCK_D)
    front_tiles = tl.cdiv(n_front, chunk_size)
    tiles = front_tiles + tl.cdiv(middle, chunk_size) + tl.cdiv(slots - n_front - middle, chunk_size)
    if IN_PLACE:
        for b in range(batch):
            if tl.load(due_ptr + b) != 0:
                state = _state(rows_ptr, b, ROWS)
                for item in range(first, rows * slices, tl.num_programs(0)):
                    row, part = (state * rows + item // slices).to(tl.int64), item % slices
                    of_batch = (b * rows + item // slices).to(tl.int64)
                    for tile in range(front_tiles, tiles):
                        _move_tile(
                            old_keys_ptr, old_values_ptr, old_degree_ptr, keys_ptr, values_ptr, degree_ptr,
                            partner_ptr, plan_ptr, row, of_batch, tile, part, slots, slots, n_front, middle,
                            chunk_size, merges, HEAD_DIM, BLOCK, BLOCK_D, IN_PLACE, INT8,
                        )  # fmt: skip
                    if part == 0:
                        stored: tl.constexpr = _STORED if INT8 else 1
                        for start in range((slots - merges) * stored, slots * stored, BLOCK):
                            number = start + tl.arange(0, BLOCK)
                            tl.store(degree_ptr + row * slots * stored + number, 0.0, mask=number < slots * stored)
    else:
        row, tile, part = (first // slices // tiles).to(tl.int64), first // slices % tiles, first % slices
        _move_tile(
            old_keys_ptr, old_values_ptr, old_degree_ptr, keys_ptr, values_ptr, degree_ptr,
            partner_ptr, plan_ptr, row, row, tile, part, slots, slots - merges, n_front, middle, chunk_size, merges,
            HEAD_DIM, BLOCK, BLOCK_D, IN_PLACE, INT8,
        )  # fmt: skip


@triton.jit
def _move_tile(  # type: ignore[no-untyped-def]
    old_keys_ptr, old_values_ptr, old_degree_ptr, keys_ptr, values_ptr, degree_ptr, partner_ptr, plan_ptr,
    row, of_batch, tile, part, slots, new_slots, n_front, middle, chunk_size, merges,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, IN_PLACE: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Move one slice of the slots of a tile: of `row`, with the plan and the old degrees of row `of_batch`.

    Slots of 8 bits are one slice of keys and one of values, in place; either stores the steps of its own.
    """
    stored: tl.constexpr = _STORED if INT8 else 1
    chunk = tile - tl.cdiv(n_front, chunk_size)
    after = chunk - tl.cdiv(middle, chunk_size)  # the last chunk; the tiles behind hold recent slots
    start, end = n_front + chunk * chunk_size, n_front + middle
    if chunk < 0:
        start, end = tile * chunk_size, n_front
    if after >= 0:
        start, end = end + after * chunk_size, slots
    stop = tl.minimum(start + chunk_size, end)
    planned = tl.where((chunk >= 0) & (after < 0), stop, start)  # only slots before it may merge
    first_a = of_batch * ((middle + 1) // 2) + chunk * (chunk_size // 2)
    old_ptr = tl.where(part % 2 == 0, old_keys_ptr, old_values_ptr) + row * slots * HEAD_DIM
    new_ptr = tl.where(part % 2 == 0, keys_ptr, values_ptr) + row * new_slots * HEAD_DIM
    old_degree_ptr += of_batch * slots * stored
    degree_ptr += row * new_slots * stored
    i, d = tl.arange(0, BLOCK), part // 2 * BLOCK_D + tl.arange(0, BLOCK_D)
    a, b = start + 2 * i, start + 2 * i + 1
    in_a, in_b = a < stop, b < stop
    plan = tl.load(plan_ptr + first_a + i, mask=a < planned, other=0)
    partner = tl.load(partner_ptr + first_a + i, mask=a < planned, other=0)
    gone, shift = plan & 1, tl.where(after < 0, plan >> 1, merges)
    key = tl.where(gone == 1, partner * BLOCK + i, -1)  # of a member: orders by what it joins, then by slot
    mask_a, mask_b = in_a[:, None], in_b[:, None]
    if HEAD_DIM % BLOCK_D:
        mask_a, mask_b = mask_a & (d < HEAD_DIM)[None, :], mask_b & (d < HEAD_DIM)[None, :]
    tile_a = tl.load(old_ptr + a[:, None] * HEAD_DIM + d[None, :], mask=mask_a, other=0.0)
    tile_b = tl.load(old_ptr + b[:, None] * HEAD_DIM + d[None, :], mask=mask_b, other=0.0)
    degree_a = tl.load(old_degree_ptr + a * stored, mask=in_a, other=0.0)
    degree_b = tl.load(old_degree_ptr + b * stored, mask=in_b, other=1.0)

    dtype = new_ptr.dtype.element_ty
    keep = in_a & (gone == 0)
    to_a, to_b = a - shift, b - shift - gone
    if not IN_PLACE:  # then nothing has to wait for the loads, and the registers are free for the sums
        tl.store(new_ptr + to_a[:, None] * HEAD_DIM + d[None, :], tile_a.to(dtype), mask=mask_a & keep[:, None])

    # Every slot of B takes up the next of its members, in slot order, until nobody has one left: few turns, each a
    # gather that hits the cache. A product with a one-hot matrix would do the work of BLOCK turns, in float32.
    wide_b = tile_b.to(tl.float32)
    if INT8:
        step_a = tl.load(old_degree_ptr + a * stored + 1 + part, mask=in_a, other=0.0)
        step_b = tl.load(old_degree_ptr + b * stored + 1 + part, mask=in_b, other=0.0)
        wide_b = wide_b * step_b[:, None]
    total, acc = degree_b, wide_b * degree_b[:, None]
    last, members = i * BLOCK - 1, tl.zeros([BLOCK], tl.int32)  # key of the last member taken up, and their number
    left = tl.sum(gone)
    while left > 0:
        last = tl.min(tl.where(key[None, :] > last[:, None], key[None, :], _END), axis=1)  # [B, A] -> [B]
        found = last < (i + 1) * BLOCK
        last = tl.where(found, last, _END)
        slot = start + 2 * (last % BLOCK)
        weight = tl.load(old_degree_ptr + slot * stored, mask=found, other=0.0)
        mask = found[:, None]
        if HEAD_DIM % BLOCK_D:
            mask = mask & (d < HEAD_DIM)[None, :]
        taken = tl.load(old_ptr + slot[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        taken = taken.to(tl.float32)
        if INT8:
            taken = taken * tl.load(old_degree_ptr + slot * stored + 1 + part, mask=found, other=0.0)[:, None]
        acc += taken * weight[:, None]
        total += weight
        members += found.to(tl.int32)
        left -= tl.sum(found.to(tl.int32))
    merged = tl.div_rn(acc, tl.broadcast_to(total[:, None], [BLOCK, BLOCK_D]))
    if INT8:
        new_step = step_of(largest_of(merged, 1))
        merged = whole_numbers(merged, new_step[:, None])

    # n K / n need not be K: a slot that took part in no merge is stored as it was loaded.
    tile_b = tl.where((members > 0)[:, None], merged.to(dtype), tile_b.to(dtype))
    if IN_PLACE:
        # The old and new places of a tile overlap: all warps must have loaded before one of them stores. Behind the
        # stores no barrier is needed: they lie left of what the next tile loads.
        tl.debug_barrier()
        tl.store(new_ptr + to_a[:, None] * HEAD_DIM + d[None, :], tile_a.to(dtype), mask=mask_a & keep[:, None])
    tl.store(new_ptr + to_b[:, None] * HEAD_DIM + d[None, :], tile_b, mask=mask_b)
    if INT8:
        tl.store(degree_ptr + to_a * stored + 1 + part, step_a, mask=keep)
        tl.store(degree_ptr + to_b * stored + 1 + part, tl.where(members > 0, new_step, step_b), mask=in_b)
    if part == 0:
        tl.store(degree_ptr + to_a * stored, degree_a, mask=keep)
        tl.store(degree_ptr + to_b * stored, total, mask=in_b)


_SELECT = Blocks(1024, 1, num_warps=8, num_stages=1)


def builds() -> list[Build]:
    """Return every specialisation that ships: chunks of 128 for the head sizes of common models, and other chunks.

    A kernel is built in place for decode and out of place for prefill, which reads one dtype and writes another.
    """
    return [
        *(_select_build(*choice) for choice in ((False, False), (True, False), (True, True))),
        *(
            make(dtype, dim)
            for make in (_attend_build, _exchange_build)
            for dtype in (torch.bfloat16, torch.float32)
            for dim in (64, 128)
        ),
        *(build for dim in (64, 128) for build in _int8_builds(dim)),
        *(build for dtype in POINTERS for dim in HEAD_DIMS for build in _builds(dtype, dim, 128)),
        *(build for chunk_size in (64, 256) for build in _builds(torch.bfloat16, 128, chunk_size)),
    ]


def _builds(dtype: torch.dtype, dim: int, chunk_size: int) -> Iterator[Build]:
    for in_place in (False, True):
        yield _match_build(dtype, dim, chunk_size, in_place)
    yield _move_build(dtype, dtype, dim, chunk_size, in_place=True)
    wide = torch.float32
    for old, new in dict.fromkeys([(dtype, dtype), (dtype, wide), (wide, dtype)]):
        yield _move_build(old, new, dim, chunk_size, in_place=False)


def _int8_builds(dim: int) -> Iterator[Build]:
    """Those of a compaction in decode with slots of 8 bits, of a model in bfloat16."""
    yield _attend_build(torch.bfloat16, dim, int8=True)
    yield _exchange_build(torch.int8, dim)
    yield _match_build(torch.int8, dim, 128, in_place=True)
    yield _move_build(torch.int8, torch.int8, dim, 128, in_place=True)


def _attend_build(dtype: torch.dtype, dim: int, int8: bool = False) -> Build:
    blocks = attend_blocks(dtype.itemsize, int8)
    pointers = dict.fromkeys(("keys_ptr", "queries_ptr"), POINTERS[dtype]) | {"fill_ptr": "*i64", "active_ptr": "*i1"}
    pointers |= {"rows_ptr": "*i64"} | ({"keys_ptr": INT8} if int8 else {})
    return Build(
        f"attend{'-int8' * int8}-{POINTERS[dtype][1:]}-D{dim}",
        _attend_kernel,
        signature(_attend_kernel, pointers, "*fp32"),
        {"HEAD_DIM": dim, "BLOCK_Q": _QUERIES, "BLOCK_N": blocks.pairs, "BLOCK_D": blocks.d, "ROWS": False}
        | {"INT8": int8},
        blocks.num_warps,
        blocks.num_stages,
    )


def _exchange_build(dtype: torch.dtype, dim: int) -> Build:
    blocks = exchange_blocks(dim)
    pointers = dict.fromkeys(("keys_ptr", "values_ptr"), _pointer(dtype)) | {"fill_ptr": "*i64", "active_ptr": "*i1"}
    pointers |= dict.fromkeys(("degree_ptr", "queries_ptr", "scores_ptr"), "*fp32") | {"rows_ptr": "*i64"}
    return Build(
        f"exchange-{_pointer(dtype)[1:]}-D{dim}",
        _exchange_kernel,
        signature(_exchange_kernel, pointers, "*i32"),
        {"HEAD_DIM": dim, "BLOCK_D": blocks.d, "BLOCK_N": blocks.pairs, "BLOCK": _SCORES, "ROWS": False}
        | {"INT8": dtype == torch.int8},
        blocks.num_warps,
        blocks.num_stages,
    )


def _pointer(dtype: torch.dtype) -> str:
    return INT8 if dtype == torch.int8 else POINTERS[dtype]


def _match_build(dtype: torch.dtype, dim: int, chunk_size: int, in_place: bool) -> Build:
    blocks = match_blocks(max(2, dtype.itemsize), chunk_size)
    pointers = {"keys_ptr": _pointer(dtype)} | ({"fill_ptr": "*i64", "active_ptr": "*i1"} if in_place else {})
    return Build(
        f"match{'-in-place' if in_place else ''}-{_pointer(dtype)[1:]}-D{dim}-c{chunk_size}",
        _match_kernel,
        signature(_match_kernel, pointers, "*i32"),
        {"HEAD_DIM": dim, "BLOCK": blocks.pairs, "BLOCK_D": blocks.d, "IN_PLACE": in_place, "ROWS": False},
        blocks.num_warps,
        blocks.num_stages,
    )


def _select_build(in_place: bool, int8: bool) -> Build:
    guard = {"degree_ptr": "*fp32", "old_degree_ptr": "*fp32", "fill_ptr": "*i64", "position_ptr": "*i64"}
    return Build(
        f"select{'-in-place' if in_place else ''}{'-int8' if int8 else ''}",
        _select_kernel,
        signature(_select_kernel, guard | {"active_ptr": "*i1"} if in_place else {}, "*i32"),
        {"BLOCK": _SELECT.pairs, "IN_PLACE": in_place, "ROWS": False, "INT8": int8},
        _SELECT.num_warps,
        _SELECT.num_stages,
    )


def _move_build(old: torch.dtype, new: torch.dtype, dim: int, chunk_size: int, in_place: bool) -> Build:
    blocks = move_blocks(dim, old.itemsize, chunk_size)
    pointers = {f"old_{name}_ptr": _pointer(old) for name in ("keys", "values")}
    pointers |= {f"{name}_ptr": _pointer(new) for name in ("keys", "values")}
    pointers |= {"old_degree_ptr": "*fp32", "degree_ptr": "*fp32"}
    return Build(
        f"move{'-in-place' if in_place else ''}-{_pointer(old)[1:]}-{_pointer(new)[1:]}-D{dim}-c{chunk_size}",
        _move_kernel,
        signature(_move_kernel, pointers, "*i32"),
        {"HEAD_DIM": dim, "BLOCK": blocks.pairs, "BLOCK_D": blocks.d, "IN_PLACE": in_place, "ROWS": False}
        | {"INT8": old == torch.int8},
        blocks.num_warps,
        blocks.num_stages,
    )
