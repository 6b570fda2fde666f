"""The Triton attention kernels against the reference: run natively on a GPU, or with TRITON_INTERPRET=1 on the CPU."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from device import DEVICE
from torch import Tensor

from ckv_compile.kernels import attention
from ckv_compile.reference import Row, attend_row

pytestmark = pytest.mark.gpu
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAYERS, LAYER = 2, 1
GARBAGE = (float("nan"), float("inf"), float("-inf"))


class Step(NamedTuple):
    """The arguments of one decode step, without layer and scale."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    degree: Tensor
    fill: Tensor
    active: Tensor

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def clone(self) -> "Step":
        return Step(*(tensor.clone() for tensor in self))

    def row(self, b: int) -> "Step":
        return Step(*(tensor[b : b + 1].clone() for tensor in self))


def make_step(
    fill: Sequence[int], *, heads: int = 2, group: int = 2, capacity: int = 100, dim: int = 64, dtype: str = "fp32"
) -> Step:
    """A random step. Slots from `fill` on are empty and hold NaN and infinities, as anything may be left there."""
    generator = torch.Generator().manual_seed(sum(fill) + 7 * capacity + dim)
    batch, kind = len(fill), DTYPES[dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kind)

    keys, values = (normal(batch, LAYERS, heads, capacity, dim) for _ in range(2))
    degree = torch.randint(1, 50, (batch, LAYERS, heads, capacity), generator=generator).float()
    for b, used in enumerate(fill):
        degree[b, :, :, used:] = 0.0
        put_garbage(keys[b, :, :, used:], values[b, :, :, used:])
    step = Step(
        q=normal(batch, heads * group, 1, dim),
        k=normal(batch, heads, 1, dim),
        v=normal(batch, heads, 1, dim),
        keys=keys,
        values=values,
        degree=degree,
        fill=torch.tensor(fill),
        active=torch.ones(batch, dtype=torch.bool),
    )
    return Step(*(tensor.to(DEVICE) for tensor in step))


def put_garbage(*tensors: Tensor) -> None:
    for tensor in tensors:
        for i, value in enumerate(GARBAGE):
            tensor[..., i::3] = value


def attend_wide(q: Tensor, keys: Tensor, values: Tensor, degree: Tensor, scale: float, tail: int = 1) -> Tensor:
    """The reference in float64, over the slots that are not empty: q [S, D], keys, values [n, D], degree [n]."""
    kept = degree > 0
    row = Row(keys[kept].double(), values[kept].double(), degree[kept])
    return attend_row(q.double(), row, scale, causal_tail=tail)


def expected_step(step: Step) -> Tensor:
    """What the step should return [B, H, 1, D], in float64."""
    out = torch.zeros(step.q.shape, dtype=torch.float64, device=step.q.device)
    group = step.q.shape[1] // step.k.shape[1]
    for b in step.active.nonzero().flatten().tolist():
        used = int(step.fill[b])
        for h in range(step.q.shape[1]):
            g = h // group
            keys, values = (
                torch.cat([cached[b, LAYER, g, :used], new[b, g]])
                for cached, new in ((step.keys, step.k), (step.values, step.v))
            )
            degree = torch.cat([step.degree[b, LAYER, g, :used], step.degree.new_ones(1)])
            out[b, h] = attend_wide(step.q[b, h], keys, values, degree, step.scale)
    return out


def run_step(step: Step, parts: int | None = None) -> Tensor:
    arguments = (*step, LAYER, step.scale)
    return attention.decode_attention(*arguments) if parts is None else attention._decode(*arguments, parts)


def assert_near(out: Tensor, expected: Tensor, *, largest_value: float = 4.0, largest_score: float = 8.0) -> None:
    """Compare with the error that the arithmetic allows.

    The weights and the result are rounded to the dtype once each, and average values of up to `largest_value`; float32
    scores carry a few roundings of 2^-24 relative to the largest, which exp turns into a relative error of the weights.
    """
    epsilon = torch.finfo(out.dtype).eps
    score_error = 8 * torch.finfo(torch.float32).eps * largest_score
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=largest_value * (epsilon + score_error))


def bits(tensor: Tensor) -> Tensor:
    """The tensor as integers: NaN equals itself, and -0 is not 0."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


@pytest.mark.parametrize(
    ("fill", "heads", "group", "capacity", "dim", "dtype"),
    [
        pytest.param(fill, heads, group, capacity, dim, dtype, id=f"{dtype}-D{dim}-C{capacity}-kv{heads}-G{group}")
        for fill, heads, group, capacity, dim, dtype in [
            ([0, 1, 99], 1, 1, 100, 64, "fp32"),
            ([37, 64], 2, 3, 65, 80, "fp32"),
            ([50], 1, 7, 51, 128, "fp32"),
            ([0, 69], 1, 16, 70, 64, "bf16"),
            ([33, 1, 64], 2, 3, 100, 128, "bf16"),
            ([45], 1, 2, 47, 256, "bf16"),
            ([17, 66], 1, 7, 67, 80, "fp16"),
            ([259, 300], 1, 4, 301, 64, "fp16"),  # split
            ([5, 400], 1, 2, 401, 128, "bf16"),  # split
            ([30], 1, 20, 40, 96, "fp32"),  # more than 16 query heads
            ([11], 2, 1, 24, 24, "bf16"),  # less than a tile
        ]
    ],
)
def test_decode_agrees_with_the_reference(
    fill: list[int], heads: int, group: int, capacity: int, dim: int, dtype: str
) -> None:
    step = make_step(fill, heads=heads, group=group, capacity=capacity, dim=dim, dtype=dtype)
    expected = expected_step(step)
    out = run_step(step)
    assert out.shape == step.q.shape
    assert out.dtype == step.q.dtype
    assert out.transpose(1, 2).is_contiguous()
    assert_near(out, expected)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_writes_the_new_token_and_nothing_else(dtype: str, parts: int) -> None:
    step = make_step([0, 9, 16, 40], capacity=41, dtype=dtype)
    step.active[2] = False
    expected = step.clone()
    for b in (0, 1, 3):
        used = int(step.fill[b])
        expected.keys[b, LAYER, :, used] = step.k[b, :, 0]
        expected.values[b, LAYER, :, used] = step.v[b, :, 0]
        expected.degree[b, LAYER, :, used] = 1.0
    out = run_step(step, parts)
    for name, after, wanted in zip(Step._fields, step, expected, strict=True):
        assert same_bits(after, wanted), name
    assert same_bits(out[2], torch.zeros_like(out[2]))
    assert out[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_row_that_is_full_or_not_active_is_left_as_it_is(parts: int) -> None:
    """The host sees to it that no active row is full; here no write may leave the row all the same."""
    step = make_step([20, 20, 21], capacity=20)
    step.active[0] = False
    before = step.clone()
    run_step(step, parts)
    assert all(same_bits(after, was) for after, was in zip(step, before, strict=True))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_gives_empty_slots_no_weight(dtype: str, parts: int) -> None:
    step = make_step([50, 40], capacity=64, dtype=dtype)
    empty = [0, 3, 7, *range(16, 33), 39]  # a whole tile of the smallest size among them
    step.degree[:, :, :, empty] = 0.0
    for b in range(2):
        for tensor in (step.keys, step.values):
            garbage = torch.empty_like(tensor[b, :, :, empty])
            put_garbage(garbage)
            tensor[b, :, :, empty] = garbage
    step.degree[1, :, :, :40] = 0.0  # nothing but the new token
    expected = expected_step(step)
    out = run_step(step, parts)
    assert_near(out, expected)
    assert same_bits(out[1], step.v[1].repeat_interleave(2, dim=0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_takes_degrees_up_to_a_million(dtype: str) -> None:
    step = make_step([40], capacity=48, dtype=dtype)
    step.degree[..., :40] = torch.logspace(0, 6, 40, device=DEVICE)
    expected = expected_step(step)
    assert_near(run_step(step), expected, largest_score=30.0)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_survives_large_and_tiny_inputs(dtype: str, parts: int) -> None:
    step = make_step([40, 40], capacity=48, dtype=dtype)
    size = 30.0  # scores of thousands: exp of the score itself is infinite
    tiny = torch.finfo(DTYPES[dtype]).tiny / 8  # a subnormal number
    for tensor in (step.q, step.k):
        tensor[0] *= size
        tensor[1] *= tiny
    step.keys[0, :, :, :40] *= size
    step.keys[1, :, :, :40] *= tiny
    step.values[0, :, :, :40] *= 1000.0
    expected = expected_step(step)
    out = run_step(step, parts)
    assert_near(out[0], expected[0], largest_value=4000.0, largest_score=1000.0 * 8)
    assert_near(out[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_agree(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of splits is as near to the reference as one; splits without work leave their scratch unread."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: torch.full(shape, float("nan"), **kind))
    step = make_step([150, 0, 31], heads=1, group=3, capacity=160, dtype=dtype)
    expected = expected_step(step)
    for parts in (1, 2, 5, 17):
        assert_near(run_step(step.clone(), parts), expected)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_row_has_the_same_bits_in_any_batch(parts: int) -> None:
    """Given the number of splits, a row's programs read nothing but the row.

    The public function may split a larger batch less, which rounds differently; so the number is held here.
    """
    step = make_step([70, 5, 33], capacity=80, dtype="bf16")
    alone = [step.row(b) for b in range(3)]
    out = run_step(step, parts)
    for b in range(3):
        assert same_bits(out[b : b + 1], run_step(alone[b], parts))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_decode_takes_views(dtype: str) -> None:
    """Queries, keys and values as slices of a projection, with gaps between heads, and as columns of memory."""
    step = make_step([20, 7], capacity=32, dtype=dtype)
    expected = run_step(step.clone())
    fused = torch.cat([step.q, step.k, step.v], dim=1).transpose(1, 2).contiguous()  # [B, 1, H + 2 Hkv, D]
    q, k, v = fused.transpose(1, 2).split([4, 2, 2], dim=1)
    assert not q.is_contiguous()
    assert same_bits(run_step(step.clone()._replace(q=q, k=k, v=v)), expected)
    apart = [tensor.repeat_interleave(gap, dim=1)[:, ::gap] for tensor, gap in ((step.q, 2), (step.k, 3), (step.v, 4))]
    assert apart[0].stride(1) == 2 * 64
    assert same_bits(run_step(step.clone()._replace(q=apart[0], k=apart[1], v=apart[2])), expected)
    turned = [tensor.transpose(1, 3).contiguous().transpose(1, 3) for tensor in (step.q, step.k, step.v)]
    assert turned[0].stride(-1) != 1
    assert same_bits(run_step(step.clone()._replace(q=turned[0], k=turned[1], v=turned[2])), expected)


def test_decode_refuses_what_does_not_fit() -> None:
    step = make_step([3], capacity=8)
    for changes in (
        {"q": step.q[:, :3]},
        {"v": step.v[:, :1]},
        {"values": step.values[:, :1]},
        {"degree": step.degree.double()},
        {"fill": step.fill.int()},
        {"active": step.active.int()},
        {"k": step.k.half()},
        {"keys": step.keys.transpose(2, 3).contiguous().transpose(2, 3)},
    ):
        with pytest.raises(ValueError, match=r"must|cannot"):
            run_step(step._replace(**changes))


def test_number_of_splits() -> None:
    for programs in (1, 2, 8, 31, 132, 133, 264, 1000):
        for capacity in (1, 127, 128, 255, 256, 1000, 4096, 100_000):
            parts = attention.splits(programs, capacity, 132)
            assert parts >= 1
            assert parts == 1 or parts * programs <= 2 * 132  # one wave
            assert parts == 1 or capacity / parts >= attention.MIN_SPLIT
            assert attention.splits(programs, capacity + 1, 132) >= parts
            assert attention.splits(programs + 1, capacity, 132) <= parts
    assert attention.splits(8, 4096, 132) == 32
    assert attention.splits(1, 100_000, 132) == 264


class Turn(NamedTuple):
    """The tensors of an extend call: new q [H, S, D], k, v [Hkv, S, D]; cached keys, values [Hkv, C, D], degree."""

    q: Tensor
    k: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor
    degree: Tensor


def make_turn(used: int, steps: int, *, heads: int = 1, group: int = 2, dim: int = 64, dtype: str = "fp32") -> Turn:
    """A random turn whose tensors are the views that a model passes: heads of a projection, one layer of a cache."""
    step = make_step([used, 0], heads=heads, group=group, capacity=used + 5, dim=dim, dtype=dtype)
    generator = torch.Generator().manual_seed(steps)
    fused = torch.randn(steps, heads * (group + 2), dim, generator=generator).to(step.q)
    q, k, v = fused.transpose(0, 1).split([heads * group, heads, heads])
    return Turn(q, k, v, step.keys[0, LAYER], step.values[0, LAYER], step.degree[0, LAYER])


def run_turn(turn: Turn, used: int) -> Tensor:
    return attention.extend_attention(*turn, used, turn.q.shape[-1] ** -0.5)


def expected_turn(turn: Turn, used: int) -> Tensor:
    heads, steps, dim = turn.q.shape
    out = torch.empty(turn.q.shape, dtype=torch.float64, device=turn.q.device)
    for h in range(heads):
        g = h * turn.k.shape[0] // heads
        keys, values = torch.cat([turn.keys[g, :used], turn.k[g]]), torch.cat([turn.values[g, :used], turn.v[g]])
        degree = torch.cat([turn.degree[g, :used], turn.degree.new_ones(steps)])
        out[h] = attend_wide(turn.q[h], keys, values, degree, dim**-0.5, tail=steps)
    return out


@pytest.mark.parametrize(
    ("used", "steps", "heads", "group", "dim", "dtype"),
    [
        pytest.param(used, steps, heads, group, dim, dtype, id=f"{dtype}-D{dim}-used{used}-S{steps}-kv{heads}-G{group}")
        for used, steps, heads, group, dim, dtype in [
            (0, 1, 1, 1, 64, "fp32"),
            (0, 17, 2, 2, 80, "fp32"),
            (1, 2, 1, 1, 64, "fp32"),
            (50, 17, 1, 3, 128, "fp32"),
            (0, 130, 1, 2, 64, "bf16"),
            (1, 17, 2, 1, 80, "bf16"),
            (100, 130, 1, 2, 128, "bf16"),
            (33, 2, 1, 1, 256, "bf16"),
            (64, 1, 1, 7, 64, "fp16"),
            (77, 65, 2, 2, 96, "fp16"),
        ]
    ],
)
def test_extend_agrees_with_the_reference(used: int, steps: int, heads: int, group: int, dim: int, dtype: str) -> None:
    turn = make_turn(used, steps, heads=heads, group=group, dim=dim, dtype=dtype)
    before = Turn(*(tensor.clone() for tensor in turn))
    out = run_turn(turn, used)
    assert out.shape == turn.q.shape
    assert out.dtype == turn.q.dtype
    assert out.transpose(0, 1).is_contiguous()
    assert_near(out, expected_turn(turn, used))
    assert all(same_bits(after, was) for after, was in zip(turn, before, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_extend_gives_empty_slots_no_weight(dtype: str) -> None:
    turn = make_turn(150, 9, dtype=dtype)
    empty = [*range(70), 80, 149]  # the first tile entirely
    turn.degree[:, empty] = 0.0
    for tensor in (turn.keys, turn.values):
        garbage = torch.empty_like(tensor[:, empty])
        put_garbage(garbage)
        tensor[:, empty] = garbage
    assert_near(run_turn(turn, 150), expected_turn(turn, 150))


@pytest.mark.parametrize("dtype", DTYPES)
def test_extend_takes_degrees_up_to_a_million_and_large_inputs(dtype: str) -> None:
    turn = make_turn(40, 20, dtype=dtype)
    turn.degree[:, :40] = torch.logspace(0, 6, 40, device=DEVICE)
    assert_near(run_turn(turn, 40), expected_turn(turn, 40), largest_score=30.0)
    turn.q.mul_(30.0)
    turn.k.mul_(30.0)
    turn.keys[:, :40] *= 30.0
    turn.values[:, :40] *= 1000.0
    expected = expected_turn(turn, 40)
    assert_near(run_turn(turn, 40), expected, largest_value=4000.0, largest_score=8000.0)


def test_extend_takes_columns() -> None:
    """Tensors whose last dimension is not the innermost in memory are copied first."""
    turn = make_turn(10, 6)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (turn.q, turn.k, turn.v)]
    assert turned[0].stride(-1) != 1
    out = run_turn(turn._replace(q=turned[0], k=turned[1], v=turned[2]), 10)
    assert same_bits(out, run_turn(turn, 10))
