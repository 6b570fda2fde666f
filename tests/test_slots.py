"""Slots of 8 bits: what is rounded, by how much, and what stays as it is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckv_compile import slots
from ckv_compile.reference import LARGEST, Row, rounded


def vectors(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(40, 1, generator=generator).mul(4).exp()
    return (torch.randn(40, 16, generator=generator) * size).to(dtype)


@given(seed=st.integers(0, 2**31))
def test_a_number_is_off_by_half_a_step_at_most_and_the_largest_hardly(seed):
    x = vectors(seed)
    numbers, step = slots.to_int8(x)
    assert numbers.abs().amax(dim=-1).eq(LARGEST).all()
    wide = slots.from_int8(numbers, step)
    assert ((wide - x).abs() <= step[:, None] / 2 * (1 + 1e-6)).all()
    assert (step * LARGEST / x.abs().amax(dim=-1) - 1).abs().max() < 2**-14


@given(seed=st.integers(0, 2**31))
def test_what_was_rounded_stays_as_it_is(seed):
    once = slots.to_int8(vectors(seed))
    for found, expected in zip(slots.to_int8(slots.from_int8(*once)), once, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_oracle_rounds_alike(dtype):
    x = vectors(0, dtype)
    row = rounded(Row(x.float(), -x.float(), torch.ones(40)))
    wide = slots.from_int8(*slots.to_int8(x))
    assert torch.equal(row.keys, wide)
    assert torch.equal(row.values, -wide)


def test_zeros_stay_zeros_and_what_is_no_number_shows():
    x = torch.tensor([[0.0, 0.0], [1.0, float("nan")], [float("nan"), 1.0], [float("inf"), 1.0]])
    wide = slots.from_int8(*slots.to_int8(x))
    assert wide[0].tolist() == [0.0, 0.0]
    assert wide[1:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_slots_are_read_as_they_were_written(dtype):
    int8 = dtype == torch.int8
    keys, values = torch.zeros(2, 2, 5, 8, dtype=dtype)
    degree = torch.zeros(2, 5, *([slots.STORED] if int8 else []))
    k, v, n = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.tensor([1.0, 2.0, 3.0]).expand(2, -1)
    slots.write_((k, v, n), keys[:, 1:4], values[:, 1:4], degree[:, 1:4])
    read = slots.read(keys, values, degree)
    tolerance = 0.02 if dtype != torch.float32 else 0.0
    for found, expected in zip(read, (k, v, n), strict=True):
        torch.testing.assert_close(found[:, 1:4].float(), expected, rtol=0, atol=tolerance * float(expected.max()))
        assert not found[:, 0].any()
        assert not found[:, 4].any()
    assert torch.equal(slots.weights(keys, degree), read[2])
    slots.write_((k, v, 1.0), keys[:, :3], values[:, :3], degree[:, :3])
    assert slots.weights(keys, degree)[:, :3].eq(1.0).all()
