"""The Triton attention kernels against the reference: run natively on a GPU, or with TRITON_INTERPRET=1 on the CPU."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from device import DEVICE
from torch import Tensor

from ckv_compile import clustering, slots
from ckv_compile.kernels import attention
from ckv_compile.reference import LAST, Queries, Row, attend_row, observe

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
    degree: Tensor | None  # None: a ring
    queries: Tensor | None  # likewise
    last_queries: Tensor | None  # likewise
    fill: Tensor
    active: Tensor
    position: Tensor | None  # likewise

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def clone(self) -> "Step":
        return Step(*(None if tensor is None else tensor.clone() for tensor in self))

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
        queries=torch.randn(batch, LAYERS, heads, 2, dim, generator=generator),
        last_queries=normal(batch, LAYERS, heads, LAST, group, dim),
        fill=torch.tensor(fill),
        active=torch.ones(batch, dtype=torch.bool),
        position=torch.tensor(fill) * 3 + 2**33,
    )
    return Step(*(tensor.to(DEVICE) for tensor in step))


def put_garbage(*tensors: Tensor) -> None:
    for tensor in tensors:
        for i, value in enumerate(GARBAGE):
            tensor[..., i::3] = value


def attend_wide(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    degree: Tensor,
    scale: float,
    tail: int = 1,
    softcap: float = 0.0,
    sink: Tensor | None = None,
) -> Tensor:
    """The reference in float64, over the slots that are not empty: q [S, D], keys, values [n, D], degree [n]."""
    kept = degree > 0
    row = Row(keys[kept].double(), values[kept].double(), degree[kept])
    return attend_row(q.double(), row, scale, tail, softcap, sink)


def expected_step(step: Step, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
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
            sink = None if sinks is None else sinks[h]
            out[b, h] = attend_wide(step.q[b, h], keys, values, degree, step.scale, softcap=softcap, sink=sink)
    return out


def run_step(step: Step, parts: int | None = None, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
    arguments = (*step, LAYER, step.scale, softcap, sinks)
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
        known = (expected.queries[b, LAYER], expected.last_queries[b, LAYER])
        clustering.observe_(*known, step.q[b], step.scale, int(step.position[b]))
    out = run_step(step, parts)
    torch.testing.assert_close(step.queries, expected.queries, rtol=1e-6, atol=1e-7)
    # The interpreter cuts bfloat16 off instead of rounding it.
    torch.testing.assert_close(step.last_queries, expected.last_queries, rtol=torch.finfo(step.q.dtype).eps, atol=0)
    for b in (0, 1, 3):
        step.queries[b, LAYER] = expected.queries[b, LAYER]
        place = int(step.position[b]) % LAST
        step.last_queries[b, LAYER, :, place] = expected.last_queries[b, LAYER, :, place]
    for name, after, wanted in zip(Step._fields, step, expected, strict=True):
        assert same_bits(after, wanted), name
    assert same_bits(out[2], torch.zeros_like(out[2]))
    assert out[[0, 1, 3]].isfinite().all()


def in_int8(step: Step) -> Step:
    """The step with slots of 8 bits; what empty ones hold shows in their steps."""
    (keys, key_step), (values, value_step) = (slots.to_int8(part) for part in (step.keys, step.values))
    degree = torch.stack([step.degree, key_step, value_step], dim=-1)
    return step._replace(keys=keys, values=values, degree=degree)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("dim", "dtype"), [(64, "fp32"), (80, "bf16"), (16, "fp16")], ids=str)
def test_decode_of_slots_of_8_bits(dim: int, dtype: str, parts: int) -> None:
    step = in_int8(make_step([0, 70, 99], dim=dim, dtype=dtype))
    held = slots.read(step.keys, step.values, step.degree)
    (k, k_step), (v, v_step) = (slots.to_int8(new[:, :, 0]) for new in (step.k, step.v))
    rounded = [slots.from_int8(*new)[:, :, None] for new in ((k, k_step), (v, v_step))]
    expected = expected_step(Step(step.q.float(), *rounded, *held, *step[6:]))
    before = step.clone()
    out = run_step(step, parts)
    assert_near(out, expected)
    for b, used in enumerate(step.fill.tolist()):
        assert torch.equal(step.keys[b, LAYER, :, used], k[b])
        assert torch.equal(step.values[b, LAYER, :, used], v[b])
        new = torch.stack([torch.ones_like(k_step[b]), k_step[b], v_step[b]], dim=-1)
        assert torch.equal(step.degree[b, LAYER, :, used], new)
        for part in ("keys", "values", "degree"):
            now, then = getattr(step, part).clone(), getattr(before, part)
            now[b, LAYER, :, used] = then[b, LAYER, :, used]
            assert same_bits(now[b], then[b])


@pytest.mark.parametrize("place", [0, 31])
def test_what_is_no_number_shows_in_the_step_of_its_slot(place: int) -> None:
    step = in_int8(make_step([7], dim=32))
    step.k[0, 1, 0, place], step.v[0, 0, 0, place] = float("nan"), float("inf")
    run_step(step)
    assert step.degree[0, LAYER, :, 7, 1].isnan().tolist() == [False, True]
    assert step.degree[0, LAYER, :, 7, 2].isinf().tolist() == [True, False]


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_name_the_rows_of_a_larger_state(parts: int) -> None:
    step = make_step([17, 9, 16, 40], capacity=41)
    step.active[2] = False
    other, rows = step.clone(), [3, 2, 0, 2]
    new = [part[rows] for part in step[:3]]
    named = torch.tensor(rows, device=DEVICE)
    out = attention._decode(*new, *step[3:], LAYER, step.scale, 0.0, None, parts, named)
    other.active[1] = False
    expected = run_step(other, parts)
    assert same_bits(out, expected[rows])
    for name, ours, theirs in zip(Step._fields[3:9], step[3:9], other[3:9], strict=True):
        assert same_bits(ours, theirs), name


@pytest.mark.parametrize("parts", [1, 2])
def test_a_row_that_is_full_or_not_active_is_left_as_it_is(parts: int) -> None:
    """The host sees to it that no active row is full; here no write may leave the row all the same."""
    step = make_step([20, 20, 21], capacity=20)
    step.active[0] = False
    before = step.clone()
    run_step(step, parts)
    assert all(same_bits(after, was) for after, was in zip(step, before, strict=True))


@pytest.mark.parametrize(
    ("group", "dim", "dtype", "parts"),
    [(1, 64, "fp32", 1), (2, 80, "fp32", 3), (3, 80, "bf16", 2), (20, 24, "fp16", 1)],
    ids=str,
)
def test_means_of_the_queries_follow_a_stream(group: int, dim: int, dtype: str, parts: int) -> None:
    """Against the oracle, with a cap, which they do not see; a row that pauses keeps its own."""
    step = make_step([0, 30], group=group, capacity=40, dim=dim, dtype=dtype)
    step.queries[0].zero_()
    expected, last = step.queries.double(), step.last_queries.clone()
    for token in range(4):
        q = make_step([token], group=group, dim=dim, dtype=dtype).q.expand(2, -1, -1, -1)
        step.active[1] = token % 3 != 1
        run_step(step._replace(q=q), parts, softcap=3.0)
        for b in step.active.nonzero().flatten().tolist():
            for h, own in enumerate(q[b].unflatten(0, (2, group))):
                known = Queries(*expected[b, LAYER, h], last[b, LAYER, h])
                *means, last[b, LAYER, h] = observe(known, own, step.scale, int(step.position[b]))
                expected[b, LAYER, h] = torch.stack(means)
        step.fill.add_(step.active)
        step.position.add_(step.active)
    torch.testing.assert_close(step.queries.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(step.last_queries, last, rtol=torch.finfo(q.dtype).eps, atol=0)


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
        {"queries": step.queries[:, :1]},
        {"queries": step.queries.double()},
        {"queries": step.queries.mT.contiguous().mT},
        {"queries": None},
        {"last_queries": step.last_queries[:, :, :, 1:]},
        {"last_queries": step.last_queries.half()},
        {"last_queries": step.last_queries.mT.contiguous().mT},
        {"last_queries": None},
        {"position": None},
        {"position": step.position.int()},
        {"position": step.position[None]},
        {"degree": None},
        {"fill": step.fill.int()},
        {"active": step.active.int()},
        {"k": step.k.half()},
        {"keys": step.keys.transpose(2, 3).contiguous().transpose(2, 3)},
    ):
        with pytest.raises(ValueError, match=r"must|cannot"):
            run_step(step._replace(**changes))
    for scores in ({"softcap": -1.0}, {"sinks": step.q[0, :3, 0, 0]}, {"sinks": step.q[0, :, 0, 0].half()}):
        with pytest.raises(ValueError, match="must"):
            run_step(step, **scores)


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


def run_turn(turn: Turn, used: int, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
    return attention.extend_attention(*turn, used, turn.q.shape[-1] ** -0.5, softcap, sinks)


def expected_turn(turn: Turn, used: int, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
    heads, steps, dim = turn.q.shape
    out = torch.empty(turn.q.shape, dtype=torch.float64, device=turn.q.device)
    for h in range(heads):
        g = h * turn.k.shape[0] // heads
        keys, values = torch.cat([turn.keys[g, :used], turn.k[g]]), torch.cat([turn.values[g, :used], turn.v[g]])
        degree = torch.cat([turn.degree[g, :used], turn.degree.new_ones(steps)])
        sink = None if sinks is None else sinks[h]
        out[h] = attend_wide(turn.q[h], keys, values, degree, dim**-0.5, steps, softcap, sink)
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


# Capped scores and sinks, over clusters.


@triton.jit
def _score_kernel(x_ptr, out_ptr, size, softcap, N: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n, mask=n < size, other=0.0)
    tl.store(out_ptr + n, attention._score(x, 1.0, softcap, True), mask=n < size)


def test_the_cap_is_tanh_to_a_few_roundings() -> None:
    size = torch.logspace(-30, 30, 2001)
    x = torch.cat([size, -size, torch.linspace(-3, 3, 2001), torch.tensor([0.0, float("inf"), float("-inf")])])
    x = x.to(DEVICE)
    out = torch.empty_like(x)
    _score_kernel[(1,)](x, out, x.numel(), 7.0, N=triton.next_power_of_2(x.numel()))
    torch.testing.assert_close(out.double(), 7.0 * x.double().tanh(), rtol=2e-6, atol=0)
    assert out[-3] == 0.0


def make_sinks(heads: int, dtype: str, mean: float = 3.0) -> Tensor:
    sinks = mean + torch.randn(heads, generator=torch.Generator().manual_seed(heads))
    return sinks.to(DEVICE, DTYPES[dtype])


SCORES = [
    pytest.param(softcap, sinks, id=f"{'cap' if softcap else ''}{'sinks' if sinks else ''}")
    for softcap, sinks in [(3.0, False), (0.0, True), (3.0, True)]
]
"""Caps that matter at scores of a few, and sinks; what is neither is tested above."""


@pytest.mark.parametrize(("softcap", "with_sinks"), SCORES)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_decode_caps_scores_and_takes_sinks(dtype: str, parts: int, softcap: float, with_sinks: bool) -> None:
    step = make_step([0, 70, 33, 9], group=3, capacity=80, dtype=dtype)
    step.active[2] = False
    step.degree[1, :, :, 40:60] = 0.0
    sinks = make_sinks(6, dtype, mean=7.0) if with_sinks else None
    plain, expected = expected_step(step), expected_step(step, softcap, sinks)
    assert (plain - expected)[[1, 3]].abs().amax() > 0.1  # the test can see the difference
    out = run_step(step, parts, softcap, sinks)
    assert_near(out, expected)
    assert same_bits(out[2], torch.zeros_like(out[2]))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_decode_caps_scores_of_thousands_beside_degrees_of_a_million(dtype: str, parts: int) -> None:
    step = make_step([40], capacity=48, dtype=dtype)
    step.degree[..., :40] = torch.logspace(0, 6, 40, device=DEVICE)
    for tensor in (step.q, step.k, step.keys[..., :40, :]):
        tensor *= 30.0
    for softcap in (1.0, 50.0):
        out = run_step(step.clone(), parts, softcap)
        assert_near(out, expected_step(step, softcap), largest_score=1000.0 * 8)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_sink_can_dominate_or_vanish(dtype: str, parts: int) -> None:
    step = make_step([50, 0], capacity=64, dtype=dtype)
    much = torch.full((4,), 300.0, dtype=DTYPES[dtype], device=DEVICE)
    assert not run_step(step.clone(), parts, sinks=much).any()
    for little in (-much, much * float("-inf")):
        out = run_step(step.clone(), parts, sinks=little)
        assert_near(out, expected_step(step))
        assert same_bits(out[1], step.v[1].repeat_interleave(2, dim=0))
    mixed = torch.tensor([300.0, 4.0, -300.0, 5.0]).to(much).repeat_interleave(2)[::2]
    assert not mixed.is_contiguous()
    assert_near(run_step(step.clone(), parts, sinks=mixed), expected_step(step, sinks=mixed))


@pytest.mark.parametrize(("softcap", "with_sinks"), SCORES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_extend_caps_scores_and_takes_sinks(dtype: str, softcap: float, with_sinks: bool) -> None:
    sinks = make_sinks(4, dtype, mean=7.0) if with_sinks else None
    for used, steps in ((0, 3), (50, 20)):
        turn = make_turn(used, steps, heads=2, dtype=dtype)
        turn.degree[:, 5:30] = 0.0
        plain, expected = expected_turn(turn, used), expected_turn(turn, used, softcap, sinks)
        assert (plain - expected).abs().amax() > 0.1
        assert_near(run_turn(turn, used, softcap, sinks), expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_extend_caps_scores_of_thousands_and_a_sink_can_dominate(dtype: str) -> None:
    turn = make_turn(40, 20, dtype=dtype)
    for tensor in (turn.q, turn.k, turn.keys[:, :40]):
        tensor.mul_(30.0)
    sinks = torch.tensor([300.0, 48.0], device=DEVICE).to(turn.q)
    out = run_turn(turn, 40, 50.0, sinks)
    assert not out[0].any()
    assert_near(out, expected_turn(turn, 40, 50.0, sinks), largest_score=8000.0)
    assert_near(run_turn(turn, 40, 50.0, sinks * float("-inf")), expected_turn(turn, 40, 50.0), largest_score=8000.0)


# Rings: layers with a sliding window.


class History(NamedTuple):
    """All tokens of a row, and queries for some: keys, values [Hkv, T, D], queries [H, T, D]."""

    keys: Tensor
    values: Tensor
    queries: Tensor

    def expected(self, tokens: slice, window: int, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
        """The attention [H, S, D] of the queries of `tokens`, in float64."""
        outs = []
        keys, values = (part[:, : tokens.stop].double() for part in self[:2])
        for h, q in enumerate(self.queries[:, tokens].double()):
            g = h * len(keys) // len(self.queries)
            row = Row(keys[g], values[g], torch.ones(tokens.stop, device=q.device))
            sink = None if sinks is None else sinks[h]
            outs.append(attend_row(q, row, q.shape[-1] ** -0.5, len(q), softcap, sink, window))
        return torch.stack(outs)

    def ring(self, seen: int, slots: int) -> tuple[Tensor, Tensor]:
        """Keys and values [Hkv, slots, D] of a ring after `seen` tokens, with NaN and infinities in unused slots."""
        keys, values = (part[:, :1].repeat_interleave(slots, 1) for part in self[:2])
        put_garbage(keys, values)
        for token in range(max(0, seen - slots), seen):
            keys[:, token % slots], values[:, token % slots] = self.keys[:, token], self.values[:, token]
        return keys, values


def make_history(tokens: int, *, heads: int = 1, group: int = 2, dim: int = 128, dtype: str = "fp32") -> History:
    generator = torch.Generator().manual_seed(tokens + dim)
    fused = torch.randn(tokens, heads * (group + 2), dim, generator=generator).to(DEVICE, DTYPES[dtype])
    keys, values, queries = fused.transpose(0, 1).split([heads, heads, heads * group])
    return History(keys, values, queries)


def make_ring_step(histories: Sequence[History], fill: Sequence[int], window: int) -> Step:
    """The step in which row b takes token fill[b] of its history; layers that are not served hold garbage."""
    rings = [history.ring(seen, window) for history, seen in zip(histories, fill, strict=True)]
    keys, values = (torch.stack([part] * LAYERS, dim=1) for part in map(torch.stack, zip(*rings, strict=True)))
    put_garbage(keys[:, LAYER - 1], values[:, LAYER - 1])
    active = torch.ones(len(fill), dtype=torch.bool, device=DEVICE)
    ring = (keys, values, None, None, None, torch.tensor(fill, device=DEVICE), active, None)
    return Step(*new_tokens(histories, fill), *ring)


def new_tokens(histories: Sequence[History], tokens: Sequence[int]) -> tuple[Tensor, ...]:
    """One token a row: q [B, H, 1, D] and k, v [B, Hkv, 1, D]."""
    rows = [[part[:, n, None] for part in row] for row, n in zip(histories, tokens, strict=True)]
    k, v, q = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return q, k, v


RINGS = [
    pytest.param(window, dim, dtype, id=f"{dtype}-D{dim}-W{window}")
    for window, dim, dtype in [
        (1, 64, "fp32"),
        (5, 64, "fp32"),
        (16, 128, "fp32"),
        (37, 128, "fp32"),
        (50, 256, "bf16"),
    ]
]
"""Windows of one token, less than a tile, a tile of 16, and no multiple of one."""


@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), *SCORES])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("window", "dim", "dtype"), RINGS)
def test_decode_attends_to_a_ring_at_any_position(
    window: int, dim: int, dtype: str, parts: int, softcap: float, with_sinks: bool
) -> None:
    fill = [0, 1, window - 1, window, window + 1, 3 * window - 1]
    histories = [make_history(3 * window, dim=dim, dtype=dtype)] * len(fill)
    step = make_ring_step(histories, fill, window)
    sinks = make_sinks(2, dtype) if with_sinks else None
    out = run_step(step, parts, softcap, sinks)
    for b, seen in enumerate(fill):
        assert_near(out[b], histories[b].expected(slice(seen, seen + 1), window, softcap, sinks))


@pytest.mark.parametrize(
    ("window", "steps", "dim", "parts", "dtype"),
    [(5, 25, 64, 1, "bf16"), (17, 40, 128, 2, "fp32")],
    ids=str,
)
def test_a_stream_over_a_ring(window: int, steps: int, dim: int, parts: int, dtype: str) -> None:
    """Rows at different positions take tokens until their rings have wrapped several times; one pauses at times."""
    start = [0, 2, window + 3]
    histories = [make_history(steps + n, dim=dim, dtype=dtype) for n in start]
    sinks = make_sinks(2, dtype)
    state = make_ring_step(histories, start, window)
    for i in range(steps):
        fill = state.fill.tolist()
        q, k, v = new_tokens(histories, fill)
        state.active[1] = i % 3 != 1
        out = run_step(state._replace(q=q, k=k, v=v), parts, 4.0, sinks)
        for b, seen in enumerate(fill):
            if state.active[b]:
                assert_near(out[b], histories[b].expected(slice(seen, seen + 1), window, 4.0, sinks))
            else:
                assert not out[b].any()
        state.fill.add_(state.active)
    assert state.fill.tolist() == [steps, 2 + steps - len(range(1, steps, 3)), window + 3 + steps]
    for b, seen in enumerate(state.fill.tolist()):
        for cached, wanted in zip((state.keys, state.values), histories[b].ring(seen, window), strict=True):
            assert same_bits(cached[b, LAYER], wanted)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_decode_writes_one_slot_of_a_ring_and_does_not_read_it(dtype: str, parts: int) -> None:
    window, fill = 37, [0, 9, 37, 60]
    histories = [make_history(61, heads=2, dtype=dtype)] * len(fill)
    step = make_ring_step(histories, fill, window)
    for b in (2, 3):  # the token that has left the window
        put_garbage(step.keys[b, :, :, fill[b] % window], step.values[b, :, :, fill[b] % window])
    step.active[1] = False
    wanted = step.clone()
    for b in (0, 2, 3):
        wanted.keys[b, LAYER, :, fill[b] % window] = step.k[b, :, 0]
        wanted.values[b, LAYER, :, fill[b] % window] = step.v[b, :, 0]
    out = run_step(step, parts)
    for name in ("q", "k", "v", "keys", "values", "fill", "active"):
        assert same_bits(getattr(step, name), getattr(wanted, name)), name
    assert same_bits(out[1], torch.zeros_like(out[1]))
    for b in (0, 2, 3):
        assert_near(out[b], histories[b].expected(slice(fill[b], fill[b] + 1), window))


@pytest.mark.parametrize("seen", [2**24 + 1, 2**33 + 5])
def test_a_ring_counts_past_32_bits(seen: int) -> None:
    window = 21
    history = make_history(3 * window)
    near = seen % window + window  # holds the same tokens in the same slots
    step = make_ring_step([history], [near], window)
    far = step.clone()._replace(fill=torch.tensor([seen], device=DEVICE))
    assert same_bits(run_step(far), run_step(step))
    assert same_bits(far.keys[:, LAYER], step.keys[:, LAYER])


def test_ring_splits_agree_and_a_row_has_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for clusters; one split may have no slot but that of the new token."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: torch.full(shape, float("nan"), **kind))
    window, fill, sinks = 65, [134, 3, 128, 129], make_sinks(2, "fp32")
    histories = [make_history(135)] * len(fill)
    step = make_ring_step(histories, fill, window)
    for parts in (1, 2, 5, 9):
        out = run_step(step.clone(), parts, 2.0, sinks)
        for b, seen in enumerate(fill):
            assert_near(out[b], histories[b].expected(slice(seen, seen + 1), window, 2.0, sinks))
            alone = make_ring_step(histories[b : b + 1], [seen], window)
            assert same_bits(out[b : b + 1], run_step(alone, parts, 2.0, sinks))


def test_a_long_ring_is_split() -> None:
    window, seen = 2 * attention.MIN_SPLIT + 3, 300
    history = make_history(seen + 1, dim=64, dtype="bf16")
    assert attention.splits(1, window, 4) == 2
    out = run_step(make_ring_step([history], [seen], window))
    assert_near(out[0], history.expected(slice(seen, seen + 1), window))


def run_ring_turn(
    history: History, seen: int, window: int, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """The turn of all tokens after the first `seen`."""
    q, k, v = (part[:, seen:] for part in (history.queries, history.keys, history.values))
    cached = history.ring(seen, window)
    before = [tensor.clone() for tensor in cached]
    out = attention.extend_attention(q, k, v, *cached, None, seen, q.shape[-1] ** -0.5, softcap, sinks, window)
    assert all(map(same_bits, cached, before))
    return out


@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), *SCORES])
@pytest.mark.parametrize(
    ("seen", "steps", "window", "dim", "dtype"),
    [
        pytest.param(*case, id="{4}-D{3}-seen{0}-S{1}-W{2}".format(*case))
        for case in [
            (0, 1, 5, 64, "fp32"),  # nothing cached
            (0, 40, 7, 64, "fp32"),
            (0, 20, 64, 64, "fp32"),
            (0, 150, 37, 64, "bf16"),
            (3, 2, 21, 64, "fp32"),  # partly filled
            (3, 60, 21, 64, "fp32"),
            (30, 70, 33, 128, "bf16"),
            (21, 5, 21, 64, "fp32"),  # just full
            (50, 5, 21, 64, "fp32"),  # wrapped
            (50, 70, 21, 64, "fp32"),
            (95, 100, 48, 64, "bf16"),
            (17, 20, 1, 64, "fp32"),
            (77, 9, 64, 256, "fp16"),
        ]
    ],
)
def test_extend_attends_to_a_ring(
    seen: int, steps: int, window: int, dim: int, dtype: str, softcap: float, with_sinks: bool
) -> None:
    history = make_history(seen + steps, dim=dim, dtype=dtype)
    sinks = make_sinks(2, dtype) if with_sinks else None
    out = run_ring_turn(history, seen, window, softcap, sinks)
    assert out.shape == (2, steps, dim)
    assert out.transpose(0, 1).is_contiguous()
    assert_near(out, history.expected(slice(seen, seen + steps), window, softcap, sinks))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("window", [0, 9])
def test_extend_takes_a_first_prompt_without_a_cache(window: int, dtype: str) -> None:
    history, sinks = make_history(70, heads=2, dim=64, dtype=dtype), make_sinks(4, dtype)
    nothing = history.keys[:, :0]
    arguments = (history.queries, history.keys, history.values, nothing, nothing, None, 0, 64**-0.5, 5.0, sinks)
    out = attention.extend_attention(*arguments, window)
    assert_near(out, history.expected(slice(0, 70), window, 5.0, sinks))


def test_extend_reads_no_tile_before_the_window_of_its_queries() -> None:
    """Nor the ring, once it has left the window; a NaN that is read spreads, for 0 times NaN is NaN."""
    history = make_history(150, dim=64)
    expected = history.expected(slice(20, 150), 20)
    put_garbage(history.values[:, :36])
    out = run_ring_turn(history, 20, 20)
    assert out[:, :16].isnan().any()
    assert_near(out[:, 48:], expected[:, 48:])


def test_a_turn_equals_its_tokens_one_by_one() -> None:
    """The two kernels agree on where a ring keeps a token and which it sees."""
    window, seen, steps = 11, 40, 15
    history = make_history(seen + steps, heads=2, dim=64)
    turn = run_ring_turn(history, seen, window)
    state = make_ring_step([history], [seen], window)
    for i in range(steps):
        q, k, v = new_tokens([history], [seen + i])
        out = run_step(state._replace(q=q, k=k, v=v))
        torch.testing.assert_close(out[0, :, 0], turn[:, i], rtol=0, atol=1e-5)
        state.fill.add_(1)


def test_extend_refuses_a_window_that_its_cache_cannot_serve() -> None:
    turn, history = make_turn(10, 3), make_history(20, dim=64)
    new = (history.queries, history.keys, history.values)
    with pytest.raises(ValueError, match=r"window of 4 tokens .* clusters of 15 slots"):
        attention.extend_attention(*turn, 10, 0.1, window=4)
    for window in (0, 8, -1):
        with pytest.raises(ValueError, match="a ring of 9 slots"):
            attention.extend_attention(*new, *history.ring(3, 9), None, 3, 0.1, window=window)
    with pytest.raises(ValueError, match="sinks must be 2"):
        attention.extend_attention(*turn, 10, 0.1, sinks=turn.q[0, 0])
