"""The CPU decode kernel against plain float64 attention."""

import logging
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from conftest import needs_kernel

from ckv_compile.kernels import cpu

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    degree: torch.Tensor
    fill: torch.Tensor
    active: torch.Tensor
    layer: int = 1
    scale: float = 0.125
    per_row: ClassVar = ("q", "k", "v", "keys", "values", "degree", "fill", "active")

    def run(self) -> torch.Tensor:
        return cpu.decode_attention(*(getattr(self, name) for name in self.per_row), self.layer, self.scale)

    def row(self, row: int) -> "Case":
        return replace(self, **{name: getattr(self, name)[row : row + 1].clone() for name in self.per_row})

    def expected(self) -> torch.Tensor:
        """softmax(q.k * scale + log n) @ v in float64, for the cache as it is after the append."""
        group = self.q.shape[1] // self.k.shape[1]
        rows = []
        for row, fill in enumerate(self.fill.tolist()):
            new_degree = torch.ones(self.k.shape[1], 1)
            keys, values, degree = (
                torch.cat((cached[row, self.layer, :, :fill], new), 1).double().repeat_interleave(group, 0)
                for cached, new in (
                    (self.keys, self.k[row]),
                    (self.values, self.v[row]),
                    (self.degree, new_degree),
                )
            )
            scores = self.q[row].double() @ keys.mT * self.scale + degree.log().unsqueeze(1)
            values = values.masked_fill(degree.unsqueeze(2) == 0, 0.0)
            rows.append(scores.softmax(-1) @ values)
        return torch.stack(rows)


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
        fill=torch.tensor(fill),
        active=torch.ones(rows, dtype=torch.bool),
    )
    for row, used in enumerate(fill):
        for cached in (case.keys, case.values, case.degree):
            cached[row, :, :, used:] = float("nan")
    return case


def assert_right(case: Case, tolerance: float | None = None) -> None:
    expected = case.expected()
    out = case.run()
    assert out.dtype == case.q.dtype
    assert out.shape == case.q.shape
    atol = TOLERANCE[out.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 64, 72, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 7, 17])
def test_equals_the_reference(group: int, dim: int, dtype: torch.dtype) -> None:
    assert_right(make_case((0, 1, 516), capacity=517, kv_heads=1, group=group, dim=dim, dtype=dtype))


@needs_kernel
@pytest.mark.parametrize("fill", [0, 1, 2, 3, 15, 16, 17, 126, 127, 128, 129, 255, 256, 1000])
def test_every_edge_of_a_split(fill: int) -> None:
    assert_right(make_case((fill,), capacity=1001, kv_heads=3))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    batch = make_case((1500, 7, 800), capacity=1600, kv_heads=3, dtype=dtype)
    alone = [batch.row(row) for row in range(3)]
    together = batch.run()
    for row, case in enumerate(alone):
        assert torch.equal(case.run(), together[row : row + 1])


@needs_kernel
def test_the_number_of_threads_does_not_matter() -> None:
    case = make_case((1500, 800), capacity=1600, kv_heads=3)
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
    assert not wide.is_contiguous()
    assert_right(replace(case, q=wide))


@needs_kernel
def test_a_full_row_is_an_error_and_writes_nothing() -> None:
    case = make_case((3, 8), capacity=8)
    before = case.keys.clone()
    with pytest.raises(RuntimeError, match="row 1 has no free slot: fill is 8, capacity is 8"):
        case.run()
    torch.testing.assert_close(case.keys, before, rtol=0, atol=0, equal_nan=True)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
def test_what_does_not_fit_together_is_refused() -> None:
    case = make_case((3,), capacity=8)
    with pytest.raises(ValueError, match="cannot serve layer 2"):
        replace(case, layer=2).run()
    with pytest.raises(ValueError, match="share one dtype"):
        replace(case, k=case.k.double()).run()
    with pytest.raises(ValueError, match="fill int64 and active bool"):
        replace(case, fill=case.fill.int()).run()
    with pytest.raises(ValueError, match="must be contiguous"):
        replace(case, keys=case.keys.mT.contiguous().mT).run()


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
