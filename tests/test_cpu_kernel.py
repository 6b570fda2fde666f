"""The CPU decode kernel against the reference, in float64 but for `CacheRows`."""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from conftest import needs_kernel

from ckv_compile import clustering, slots
from ckv_compile.kernels import cpu
from ckv_compile.reference import LAST, CacheRows, Row, attend_row, rounded, widened
from ckv_compile.schedule import Schedule

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE))


@dataclass(frozen=True)
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    degree: torch.Tensor | None
    queries: torch.Tensor | None
    last_queries: torch.Tensor | None
    fill: torch.Tensor
    active: torch.Tensor
    position: torch.Tensor | None
    layer: int = 1
    scale: float = 0.125
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    per_row: ClassVar = (
        *("q", "k", "v", "keys", "values", "degree", "queries", "last_queries", "fill", "active", "position"),
    )

    def run(self) -> torch.Tensor:
        if self.q.dtype == torch.float16 and cpu.is_available(torch.float32) and not cpu.is_available(torch.float16):
            pytest.skip("this machine does not convert float16")
        arguments = [getattr(self, name) for name in self.per_row]
        return cpu.decode_attention(*arguments, self.layer, self.scale, self.softcap, self.sinks)

    def row(self, row: int) -> "Case":
        parts = {name: getattr(self, name) for name in self.per_row}
        return replace(self, **{name: part[row : row + 1].clone() for name, part in parts.items() if part is not None})

    def cached(self, row: int, kv_head: int) -> Row:
        """The slots in use before the append, in the order of their tokens: a ring's oldest may leave the window."""
        keys, values = self.keys[row, self.layer, kv_head], self.values[row, self.layer, kv_head]
        fill, capacity = int(self.fill[row]), keys.shape[0]
        if self.degree is not None:
            degree = self.degree[row, self.layer, kv_head, :fill]
            return Row(*slots.read(keys[:fill], values[:fill], degree))
        taken = torch.arange(max(fill - capacity, 0), fill) % capacity
        return Row(keys[taken], values[taken], torch.ones(len(taken)))

    def expected(self) -> torch.Tensor:
        """The reference in float64, for the cache as it is after the append."""
        rows, heads, _, _ = self.q.shape
        kv_heads, window = self.k.shape[1], self.keys.shape[3] if self.degree is None else 0
        out = torch.empty_like(self.q, dtype=torch.float64)
        for row in range(rows):
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                new = Row(self.k[row, kv_head], self.v[row, kv_head], torch.ones(1))
                if self.keys.dtype == torch.int8:
                    new = rounded(widened(new))
                whole = Row(*(torch.cat(parts).double() for parts in zip(self.cached(row, kv_head), new, strict=True)))
                empty = whole.degree[:, None] == 0  # whatever it holds
                whole = Row(whole.keys.masked_fill(empty, 0.0), whole.values.masked_fill(empty, 0.0), whole.degree)
                sink = None if self.sinks is None else self.sinks[head]
                query = self.q[row, head].double()
                out[row, head] = attend_row(query, whole, self.scale, 1, self.softcap, sink, window)
        return out


def make_case(
    fill: tuple[int, ...],
    capacity: int,
    kv_heads: int = 2,
    group: int = 3,
    dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A random case of two layers; everything beyond `fill` is NaN, so that reading it shows."""
    generator = torch.Generator().manual_seed(sum(fill) + capacity + kv_heads + group + dim)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    rows = len(fill)
    case = Case(
        q=randn(rows, kv_heads * group, 1, dim) * 2,
        k=randn(rows, kv_heads, 1, dim),
        v=randn(rows, kv_heads, 1, dim),
        keys=randn(rows, 2, kv_heads, capacity, dim),
        values=randn(rows, 2, kv_heads, capacity, dim),
        degree=torch.randint(1, 9, (rows, 2, kv_heads, capacity), generator=generator).float(),
        queries=torch.zeros(rows, 2, kv_heads, 2, dim),
        last_queries=randn(rows, 2, kv_heads, LAST, group, dim),
        fill=torch.tensor(fill),
        active=torch.ones(rows, dtype=torch.bool),
        position=torch.tensor(fill) * 3 + 5_000_000_001,
    )
    for row, used in enumerate(fill):
        for cached in (case.keys, case.values, case.degree):
            cached[row, :, :, used:] = float("nan")
    return case


def in_int8(case: Case) -> Case:
    """The case with slots of 8 bits."""
    (keys, key_step), (values, value_step) = (slots.to_int8(vectors) for vectors in (case.keys, case.values))
    assert case.degree is not None
    return replace(case, keys=keys, values=values, degree=torch.stack([case.degree, key_step, value_step], dim=-1))


def make_ring(fill: tuple[int, ...], window: int, **shape: object) -> Case:
    """A random case of rings that have seen `fill` tokens; slots not in use yet are NaN."""
    used = tuple(min(tokens, window) for tokens in fill)
    case = replace(make_case(used, window, **shape), fill=torch.tensor(fill))
    return replace(case, degree=None, queries=None, last_queries=None, position=None)


def with_sinks(case: Case) -> Case:
    """The case with a random sink for each query head, near its scores."""
    sinks = torch.randn(case.q.shape[1], generator=torch.Generator().manual_seed(0)) * 3
    return replace(case, sinks=sinks.to(case.q.dtype))


def assert_right(case: Case, tolerance: float | None = None) -> None:
    expected = case.expected()
    known = None if case.queries is None else (case.queries.clone(), case.last_queries.clone())
    out = case.run()
    if known is not None:
        for row in case.active.nonzero().flatten().tolist():
            own = (part[row, case.layer] for part in known)
            clustering.observe_(*own, case.q[row], case.scale, int(case.position[row]))
        torch.testing.assert_close(case.queries, known[0], rtol=1e-5, atol=1e-6)
        assert torch.equal(case.last_queries, known[1])
    assert out.dtype == case.q.dtype
    assert out.shape == case.q.shape
    atol = TOLERANCE[out.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


@needs_kernel
@every_dtype
@pytest.mark.parametrize("dim", [8, 64, 72, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 7, 17])
def test_equals_the_reference(group: int, dim: int, dtype: torch.dtype) -> None:
    assert_right(make_case((0, 1, 516), capacity=517, kv_heads=1, group=group, dim=dim, dtype=dtype))


@needs_kernel
@pytest.mark.parametrize("fill", [0, 1, 2, 3, 15, 16, 17, 126, 127, 128, 129, 255, 256, 1000])
def test_every_edge_of_a_split(fill: int) -> None:
    assert_right(make_case((fill,), capacity=1001, kv_heads=3))


@needs_kernel
@every_dtype
def test_degrees_up_to_a_million(dtype: torch.dtype) -> None:
    case = make_case((700,), capacity=701, dtype=dtype)
    case.degree[..., ::5] = 1e6
    assert_right(case)


@needs_kernel
def test_large_scores() -> None:
    case = make_case((700,), capacity=701)
    assert_right(replace(case, q=case.q * 50), tolerance=1e-4)  # float32 scores of about 500


@needs_kernel
def test_a_nan_is_not_hidden() -> None:
    case = make_case((300,), capacity=301)
    case.keys[0, 1, 0, 17] = float("nan")
    case.degree[..., 18] = 0.0
    case.keys[0, 1, :, 18] = float("nan")  # in an empty slot it does not count
    group = case.q.shape[1] // case.k.shape[1]
    out = case.run()
    assert out[0, :group].isnan().all()
    assert out[0, group:].isfinite().all()


@needs_kernel
def test_empty_slots_count_for_nothing() -> None:
    case = make_case((600,), capacity=601)
    case.degree[..., ::3] = 0.0
    case.degree[..., 256:512] = 0.0  # a whole split
    case.keys[..., 3, :] = 1e4 * case.q[0, 0, 0]  # the maximum by far, if it counted
    case.values[..., 3, :] = float("nan")
    assert_right(case)


@needs_kernel
def test_a_cache_of_empty_slots_gives_the_new_value() -> None:
    case = make_case((300,), capacity=301, group=1)
    case.degree[..., :300] = 0.0
    torch.testing.assert_close(case.run(), case.v)


@needs_kernel
@every_dtype
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    batch = make_case((1500, 7, 800), capacity=1600, kv_heads=3, dtype=dtype)
    alone = [batch.row(row) for row in range(3)]
    together = batch.run()
    for row, case in enumerate(alone):
        assert torch.equal(case.run(), together[row : row + 1])


@needs_kernel
@every_dtype
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 8), (5, 72), (4, 128)])
def test_slots_of_8_bits(group: int, dim: int, dtype: torch.dtype) -> None:
    case = make_case((0, 1, 516), capacity=517, kv_heads=2, group=group, dim=dim, dtype=dtype)
    for softcap in (0.0, 5.0):
        given = in_int8(with_sinks(replace(case, softcap=softcap)))
        assert_right(given)
        for row, fill in enumerate(case.fill.tolist()):
            for place, (new, held) in enumerate(((case.k, given.keys), (case.v, given.values)), start=1):
                numbers, step = slots.to_int8(new[row, :, 0])
                assert torch.equal(held[row, given.layer, :, fill], numbers)
                assert torch.equal(given.degree[row, given.layer, :, fill, place], step)
            assert given.degree[row, given.layer, :, fill, 0].eq(1.0).all()
            assert given.degree[row, :, :, fill + 1 :].isnan().all()


@needs_kernel
@pytest.mark.parametrize("place", [0, 15, 16, 63])
def test_what_is_no_number_shows_in_the_step_of_its_slot(place: int) -> None:
    case = in_int8(make_case((7,), capacity=9))
    case.k[0, 1, 0, place] = float("nan")
    case.v[0, 0, 0, place] = float("inf")
    out = case.run()
    assert case.degree[0, 1, :, 7, 1].isnan().tolist() == [False, True]
    assert case.degree[0, 1, :, 7, 2].isinf().tolist() == [True, False]
    assert out[0, :, 0].isnan().all()  # of the queries of either head


@needs_kernel
def test_slots_of_8_bits_are_those_of_the_row_alone_and_refused_in_a_ring() -> None:
    batch = in_int8(make_case((1500, 7, 800), capacity=1600, kv_heads=3, dtype=torch.bfloat16))
    alone = [batch.row(row) for row in range(3)]
    together = batch.run()
    for row, case in enumerate(alone):
        assert torch.equal(case.run(), together[row : row + 1])
    with pytest.raises(ValueError, match="cannot serve layer 1"):
        replace(batch, degree=None, queries=None, last_queries=None, position=None).run()
    with pytest.raises(ValueError, match="cannot serve layer 1"):
        replace(batch, degree=batch.degree[..., 0].contiguous()).run()
    with pytest.raises(ValueError, match=r"share one dtype, got .*int8 keys, torch.bfloat16 values"):
        replace(batch, values=batch.values.to(torch.bfloat16)).run()


@needs_kernel
@pytest.mark.parametrize("stored", [lambda case: case, in_int8], ids=["dtype of q", "int8"])
def test_the_number_of_threads_does_not_matter(stored: Callable[[Case], Case]) -> None:
    case = stored(make_case((1500, 800), capacity=1600, kv_heads=3))
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(case.run())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_kernel
@every_dtype
@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_softcap(softcap: float, dtype: torch.dtype) -> None:
    case = make_case((0, 2, 300), capacity=301, dtype=dtype)
    assert_right(replace(case, softcap=softcap))
    assert_right(replace(case, q=case.q * 50, softcap=softcap), tolerance=2 * TOLERANCE[dtype])  # most at the cap


@needs_kernel
@pytest.mark.parametrize("size", [1e-30, 1e-3, 0.1, 0.249, 0.251, 0.5, 1.0, 3.0, 9.0, 20.0, 50.0, 1e3, 1e30])
@pytest.mark.parametrize("dim", [8, 64])
def test_softcap_is_accurate(dim: int, size: float) -> None:
    """Scores of all sizes in units of the cap, read off the weights: with two slots, log(w / (1 - w)) is a score."""
    softcap, sizes = 8.0, torch.tensor([size, -size]).repeat(4)
    case = make_case((1,) * 8, capacity=2, kv_heads=1, group=1, dim=dim)
    for tensor in (case.q, case.k, case.v, case.keys, case.values):
        tensor.zero_()
    case.q[..., 0], case.k[:, 0, 0, 0] = 1.0, sizes * softcap
    case.v[..., 0], case.values[:, 1, 0, 0, 1] = 1.0, 1.0
    case.degree[:, :, :, 0] = 1.0
    out = replace(case, scale=1.0, softcap=softcap).run()[:, 0, 0].double()
    score = softcap * torch.tanh(sizes.double())
    # A weight of float32 has an error of some 1e-7 of itself, and so has the score; exp(-8) and exp(8) are far enough.
    torch.testing.assert_close((out[:, 0] / out[:, 1]).log(), score, rtol=0, atol=1e-6 * softcap)


@needs_kernel
def test_softcap_keeps_the_digits_of_small_scores() -> None:
    case = make_case((700,), capacity=701)
    wide = replace(case, softcap=1e5)
    assert_right(wide)  # with an error of 1e-7 of the cap in a score, this would be wrong by 1e-2
    torch.testing.assert_close(wide.run(), case.run(), rtol=0, atol=TOLERANCE[torch.float32])


@needs_kernel
@every_dtype
@pytest.mark.parametrize("dim", [8, 64, 80])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_sinks(group: int, dim: int, dtype: torch.dtype) -> None:
    assert_right(with_sinks(make_case((0, 1, 300), capacity=301, group=group, dim=dim, dtype=dtype)))


@needs_kernel
@every_dtype
def test_a_dominating_sink_leaves_nothing_and_a_low_one_changes_nothing(dtype: torch.dtype) -> None:
    case = make_case((300, 5), capacity=301, dtype=dtype)
    heads = case.q.shape[1]
    plain = case.run()
    sinks = torch.full((heads,), -1e4, dtype=dtype)
    sinks[0], sinks[2], sinks[3] = 1e4, float("-inf"), 40.0
    out = replace(case, sinks=sinks).run()
    assert not out[:, 0].any()
    assert out[:, 3].abs().max() < 1e-6
    kept = [head for head in range(heads) if head not in (0, 3)]
    assert torch.equal(out[:, kept], plain[:, kept])
    assert_right(replace(case, sinks=sinks))


@needs_kernel
def test_a_nan_sink_is_not_hidden() -> None:
    case = with_sinks(make_case((300,), capacity=301))
    case.sinks[2] = float("nan")
    out = case.run()
    assert out[:, 2].isnan().all()
    assert out[:, [0, 1, 3, 4, 5]].isfinite().all()


@needs_kernel
@every_dtype
@pytest.mark.parametrize("window", [1, 2, 3, 5, 7, 15, 17, 127, 128, 129, 300, 512])
def test_rings_of_any_size_and_position(window: int, dtype: torch.dtype) -> None:
    fill = (0, 1, window - 1, window, window + 1, 3 * window + window // 2, 5_000_000_000 + window // 3)
    assert_right(make_ring(fill, window, dtype=dtype))


@needs_kernel
@pytest.mark.parametrize("dim", [8, 72, 128])
@pytest.mark.parametrize("group", [1, 8])
def test_rings_of_any_shape(group: int, dim: int) -> None:
    assert_right(make_ring((50, 1_234_567), window=200, kv_heads=1, group=group, dim=dim))


@needs_kernel
@every_dtype
def test_everything_at_once(dtype: torch.dtype) -> None:
    ring = with_sinks(make_ring((7, 3_000_000, 333), window=333, dtype=dtype))
    cache = with_sinks(make_case((7, 300, 333), capacity=334, dtype=dtype))
    cache.degree[..., ::5] = 0.0
    for case in (ring, cache):
        assert_right(replace(case, softcap=4.0))


@needs_kernel
@every_dtype
@pytest.mark.parametrize("window", [1, 3, 20, 130])
def test_a_ring_step_by_step(window: int, dtype: torch.dtype) -> None:
    """The reference driven like the kernel: two rows, one of which joins later, until both have wrapped."""
    steps, kv_heads, group, dim, layer, softcap = 2 * window + 40, 2, 2, 16, 1, 6.0
    generator = torch.Generator().manual_seed(window)
    keys, values = torch.full((2, 2, 2, kv_heads, window, dim), float("nan"), dtype=dtype)
    schedule = Schedule(budget=64, n_sink=4, n_recent=32, chunk_size=128, r_init=0.25, r_decay=0.01, r_min=0.05)
    references = [CacheRows(schedule, capacity=128) for _ in range(2)]
    fill, sinks = torch.zeros(2, dtype=torch.int64), torch.randn(kv_heads * group, generator=generator).to(dtype)
    for step in range(steps):
        q, k, v = (
            torch.randn(2, heads, 1, dim, generator=generator).to(dtype)
            for heads in (kv_heads * group, kv_heads, kv_heads)
        )
        active = torch.tensor([True, step >= 5])
        ring = (keys, values, None, None, None, fill, active, None)
        case = Case(q, k, v, *ring, layer, dim**-0.5, softcap, sinks)
        out = case.run()
        options = (dim**-0.5, softcap, sinks, window)
        expected = torch.zeros_like(q)
        for row, rows in enumerate(references):
            if active[row]:
                expected[row : row + 1] = rows.attend(layer, *(t[row : row + 1] for t in (q, k, v)), *options)
        torch.testing.assert_close(out, expected, rtol=0, atol=2 * TOLERANCE[dtype])  # both are rounded
        fill += active
    assert keys[:, 0].isnan().all()
    assert keys[:, 1].isfinite().all()


@needs_kernel
@pytest.mark.parametrize("window", [3, 1000])
def test_a_ring_takes_the_new_token_in_its_slot_and_nowhere_else(window: int) -> None:
    case = make_ring((0, window + 1, 7 * window - 1), window)
    keys, values = case.keys.clone(), case.values.clone()
    for row, slot in enumerate((0, 1, window - 1)):
        keys[row, 1, :, slot] = case.k[row, :, 0]
        values[row, 1, :, slot] = case.v[row, :, 0]
    case.run()
    for actual, expected in ((case.keys, keys), (case.values, values)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@needs_kernel
@every_dtype
@pytest.mark.parametrize("new_split", range(4))
def test_a_ring_has_the_same_bits_in_any_batch_and_with_any_threads(new_split: int, dtype: torch.dtype) -> None:
    """Wherever the new slot is; a thread that read it too early would see the NaN that is there before."""
    fill = (500 * 9 + new_split * 128 + 60, 3, 2_000_000, 499)
    batch = with_sinks(replace(make_ring(fill, window=500, kv_heads=3, dtype=dtype), softcap=20.0))
    for row, tokens in enumerate(fill):
        batch.keys[row, :, :, tokens % 500] = batch.values[row, :, :, tokens % 500] = float("nan")
    alone = torch.cat([batch.row(row).run() for row in range(4)])
    assert alone.isfinite().all()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            fresh = replace(batch, keys=batch.keys.clone(), values=batch.values.clone())
            assert torch.equal(fresh.run(), alone)
    finally:
        torch.set_num_threads(threads)


@needs_kernel
def test_a_row_of_a_ring_that_is_not_active_is_left_as_it_is() -> None:
    case = with_sinks(make_ring((300, 1_000_000, 20), window=150))
    case = replace(case, fill=torch.tensor([300, -1, 20]), active=torch.tensor([True, False, True]))  # 1: nonsense
    before, alone = case.row(1), [case.row(0).run(), case.row(2).run()]
    out = case.run()
    assert not out[1].any()
    assert torch.equal(out[0::2], torch.cat(alone))
    after = case.row(1)
    for name in ("keys", "values"):
        torch.testing.assert_close(getattr(after, name), getattr(before, name), rtol=0, atol=0, equal_nan=True)


@needs_kernel
def test_float16_overflows_to_infinity_and_keeps_small_numbers() -> None:
    case = make_case((1,), capacity=2, kv_heads=1, group=1, dtype=torch.float16)
    case.v.fill_(65504.0)
    case.values.fill_(6e-8)  # subnormal
    case.q.zero_()
    case.degree[..., 0] = 1e6
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-3, atol=0)
    case.v.fill_(float("inf"))
    assert case.run().isposinf().all()


@needs_kernel
def test_appends_to_its_layer_and_nowhere_else() -> None:
    case = make_case((4, 9), capacity=12)
    keys, values, degree = case.keys.clone(), case.values.clone(), case.degree.clone()
    for row, slot in enumerate((4, 9)):
        keys[row, 1, :, slot] = case.k[row, :, 0]
        values[row, 1, :, slot] = case.v[row, :, 0]
        degree[row, 1, :, slot] = 1.0
    case.run()
    for actual, expected in ((case.keys, keys), (case.values, values), (case.degree, degree)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@needs_kernel
def test_strided_inputs() -> None:
    case = make_case((20, 30), capacity=40)
    wide = torch.cat((case.q, case.q), dim=3)[..., :64]
    sinks = torch.randn(12)[::2]
    assert not wide.is_contiguous()
    assert not sinks.is_contiguous()
    assert_right(replace(case, q=wide, sinks=sinks))


@needs_kernel
def test_a_full_row_is_an_error_and_writes_nothing() -> None:
    case = make_case((3, 8), capacity=8)
    before = case.keys.clone()
    with pytest.raises(RuntimeError, match="row 1 has no free slot: fill is 8, capacity is 8"):
        case.run()
    torch.testing.assert_close(case.keys, before, rtol=0, atol=0, equal_nan=True)


@needs_kernel
@every_dtype
def test_a_row_that_is_not_active_is_left_as_it_is(dtype: torch.dtype) -> None:
    case = make_case((300, 8, 20), capacity=301, dtype=dtype)
    case = replace(case, fill=torch.tensor([300, 301, 20]), active=torch.tensor([True, False, True]))  # 1: no free slot
    before, alone = case.row(1), [case.row(0).run(), case.row(2).run()]
    out = case.run()
    assert not out[1].any()
    assert torch.equal(out[0::2], torch.cat(alone))
    after = case.row(1)
    for name in case.per_row:
        torch.testing.assert_close(getattr(after, name), getattr(before, name), rtol=0, atol=0, equal_nan=True)


@needs_kernel
@pytest.mark.parametrize("rows", [[3], [-1, 0]], ids=str)
def test_a_row_that_is_not_in_the_state_is_an_error(rows: list[int]) -> None:
    case = make_case((3, 8, 2), capacity=9)
    new = [part[: len(rows)] for part in (case.q, case.k, case.v)]
    known = (case.degree, case.queries, case.last_queries)
    state = (case.keys, case.values, *known, case.fill, case.active, case.position)
    with pytest.raises(IndexError, match="must lie between 0 and 2"):
        cpu.decode_attention(*new, *state, 1, case.scale, rows=torch.tensor(rows))


@needs_kernel
def test_what_does_not_fit_together_is_refused() -> None:
    case = make_case((3,), capacity=8)
    with pytest.raises(ValueError, match="cannot serve layer 2"):
        replace(case, layer=2).run()
    with pytest.raises(ValueError, match="share one dtype"):
        replace(case, k=case.k.double()).run()
    for changes in ({"fill": case.fill.int()}, {"position": case.position.int()}):
        with pytest.raises(ValueError, match="fill, position int64 and active bool"):
            replace(case, **changes).run()
    for changes in (
        {"last_queries": case.last_queries[:, :, :, 1:]},
        {"last_queries": case.last_queries.flatten(3, 4)},
        {"last_queries": None},
        {"position": None},
        {"position": case.position[None]},
    ):
        with pytest.raises(ValueError, match="cannot serve layer 1"):
            replace(case, **changes).run()
    with pytest.raises(ValueError, match=r"last_queries must share one dtype"):
        replace(case, last_queries=case.last_queries.half()).run()
    with pytest.raises(ValueError, match="must be contiguous"):
        replace(case, last_queries=case.last_queries.mT.contiguous().mT).run()
    with pytest.raises(ValueError, match="must be contiguous"):
        replace(case, keys=case.keys.mT.contiguous().mT).run()
    for sinks in (torch.zeros(5), torch.zeros(1), torch.zeros(6, 1)):
        with pytest.raises(ValueError, match="cannot serve layer 1"):
            replace(case, sinks=sinks).run()
    with pytest.raises(ValueError, match=r"share one dtype.*bfloat16 sinks"):
        replace(case, sinks=torch.zeros(6, dtype=torch.bfloat16)).run()
    for degree in (case.degree[..., :7], case.degree[0], case.degree[:, :1]):
        with pytest.raises(ValueError, match="cannot serve layer 1"):
            replace(case, degree=degree).run()
    with pytest.raises(ValueError, match="degree, queries must be float32"):
        replace(case, degree=case.degree.double()).run()
    with pytest.raises(ValueError, match="must be contiguous"):
        replace(case, degree=case.degree.mT.contiguous().mT).run()


@needs_kernel
def test_a_ring_that_does_not_fit_is_refused() -> None:
    case = make_ring((3, 100), window=8)
    with pytest.raises(RuntimeError, match="row 1 has no free slot: fill is -1"):
        replace(case, fill=torch.tensor([3, -1])).run()
    with pytest.raises(RuntimeError, match="row 0 has no free slot: fill is 3, capacity is 0"):
        replace(case, keys=case.keys[..., :0, :], values=case.values[..., :0, :]).run()
    with pytest.raises(ValueError, match=r"cannot serve layer 1.*None"):
        replace(case, values=case.values[..., :7, :]).run()


@needs_kernel
def test_a_machine_without_float16_has_the_other_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.is_available(torch.float32)
    functions = {
        symbol + cpu._INT8 * int8: cpu._kernels()[dtype, int8]
        for dtype, symbol in cpu._SYMBOLS.items()
        for int8 in (False, True)
        if dtype != torch.float16
    }
    monkeypatch.setattr("torch._inductor.codecache.CppCodeCache.load", lambda *_, **__: SimpleNamespace(**functions))
    cpu._kernels.cache_clear()
    cpu._build.cache_clear()
    try:
        assert [cpu.is_available(dtype) for dtype in TOLERANCE] == [True, True, False]
    finally:
        cpu._kernels.cache_clear()
        cpu._build.cache_clear()


@needs_kernel
def test_a_compiled_library_is_taken_in_place_of_a_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library, other = shutil.copy(cpu.library(), tmp_path / "kernel.so"), tmp_path / "other.so"
    other.write_bytes(b"no library")
    monkeypatch.setattr("torch._inductor.codecache.CppCodeCache.load", None)
    cpu._kernels.cache_clear()
    cpu._build.cache_clear()
    try:
        with pytest.raises(OSError, match="other"):
            cpu.use_library(other)
        cpu.use_library(library)
        assert cpu.is_available(torch.float32)
        assert cpu.library() == library
    finally:
        cpu._kernels.cache_clear()
        cpu._build.cache_clear()


def test_other_dtypes_are_not_served() -> None:
    assert not cpu.is_available(torch.float64)


def test_the_environment_turns_it_off() -> None:
    code = "import torch; from ckv_compile.kernels import cpu; print(cpu.is_available(torch.float32))"
    environment = {**os.environ, "CKV_CPU_KERNEL": "0"}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert printed.strip() == "False"


def test_a_failed_build_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.delenv("CKV_CPU_KERNEL", raising=False)
    monkeypatch.setattr("torch._inductor.codecache.CppCodeCache.load", fail)
    cpu._kernels.cache_clear()
    cpu._build.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not cpu.is_available(torch.float32)
            assert not cpu.is_available(torch.bfloat16)
    finally:
        cpu._kernels.cache_clear()
        cpu._build.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "no CPU decode kernel, using the PyTorch form instead: no compiler here"
    ]
