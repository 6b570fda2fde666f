"""The Triton kernels of attention over a clustered KV cache: one decode step, and a turn of several tokens.

Both weigh a slot of degree n by softmax(q.k * scale + log n). They work in base 2: scores are scaled by log2(e) and
biased by log2(n), so that every weight is exp2(score - running maximum) <= 1 and fits float16 at any degree.

A slot of degree 0 is empty and may hold anything, NaN included: its score and its value are replaced, since a weight of
0 would not stop a NaN.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ckv_compile.kernels.builds import HEAD_DIMS, INTERPRETED, POINTERS, Build, multiprocessors, signature

MAX_HEAD_DIM = 256
"""Largest head that the tiles are laid out for."""

MIN_SPLIT = 128
"""Least slots of a split: fewer cost more to combine than they save."""

_KNOWN = {"degree_ptr": "*fp32", "fill_ptr": "*i64", "active_ptr": "*i1", "scale": "fp32"}  # types of arguments
_LOG2_E = 1.4426950408889634


class Blocks(NamedTuple):
    """Tile sizes and launch options of one specialisation; `builds` and the launchers read the same ones."""

    d: int  # columns of a head's tile
    m: int  # query rows (least, for decode: it grows with the group)
    n: int  # slots
    num_warps: int
    num_stages: int


COMBINE = Blocks(0, 1, 16, num_warps=4, num_stages=1)
"""Launch options of the combine kernel, which adds up n splits at a time; d is that of the decode kernel."""


def decode_blocks(head_dim: int, itemsize: int) -> Blocks:
    """Return the tiles of the decode kernel.

    A stage of the pipeline holds 8 KB of keys and as many of values. Two in flight and several programs on a
    multiprocessor keep memory busy; more does not fit the 64 KB of shared memory of gfx942, for which Triton 3.6
    fails to compile four stages besides. 16 query rows are the least a tensor core takes.
    """
    d = max(16, triton.next_power_of_2(head_dim))
    n = max(16, min(64, 8192 // (d * itemsize)))  # 16: also the least that a tensor core takes
    return Blocks(d, 16, n, num_warps=4, num_stages=3 if n * d * itemsize <= 8192 else 2)


def extend_blocks(head_dim: int, itemsize: int) -> Blocks:
    """Return the tiles of the extend kernel: the largest that spill on none of the targets."""
    d = max(16, triton.next_power_of_2(head_dim))
    if itemsize == 4:  # exact float32 products run on the vector units, whose operands all lie in registers
        return Blocks(d, 16, 16, num_warps=4 if d <= 128 else 8, num_stages=2)
    if d <= 64:
        return Blocks(d, 64, 64, num_warps=4, num_stages=3)
    if d <= 128:
        return Blocks(d, 64, 32, num_warps=4, num_stages=3)
    return Blocks(d, 64, 16, num_warps=8, num_stages=2)


def splits(programs: int, capacity: int, multiprocessors: int) -> int:
    """Return into how many parts decode cuts the slots of a KV head, so that a small batch fills the chip.

    It depends on static sizes only, so a captured CUDA graph stays valid at every fill.

    Args:
        programs: batch rows times KV heads.
        capacity: slots of a row.
        multiprocessors: of the chip; each takes two programs.
    """
    return max(1, min(2 * multiprocessors // max(1, programs), capacity // MIN_SPLIT))


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    degree: Tensor,
    fill: Tensor,
    active: Tensor,
    layer: int,
    scale: float,
) -> Tensor:
    """Appends one token to every active row of one layer, and attends over all slots used so far.

    Nothing waits for the device: `fill` and `active` are read there. The time follows the fill, not the capacity.
    The result of a row has the same bits whatever its neighbours hold, given the number of splits (see `splits`).

    Args:
        q: queries [B, H, 1, D]; D is a multiple of 8, at most 256.
        k: new keys [B, Hkv, 1, D]; query head h uses KV head h // (H // Hkv).
        v: new values [B, Hkv, 1, D].
        keys: cached keys [B, L, Hkv, C, D], contiguous, in the dtype of q; slot `fill` is written.
        values: cached values, likewise.
        degree: float32 [B, L, Hkv, C], contiguous; 0 marks an empty slot, which counts for nothing.
        fill: int64 [B]: used slots of each row, before this token. A row with no free slot is not written.
        active: bool [B]: a row that is not active is left as it is, and its output is zero.
        layer: the layer to serve.
        scale: factor of the scores.

    Returns:
        The attention output [B, H, 1, D] in the dtype of q, laid out as [B, 1, H, D].

    Raises:
        ValueError: if shapes, dtypes or memory layouts do not fit together.
    """
    batch, layers, kv_heads, capacity, dim = cache_shape = keys.shape
    heads, new_shape = q.shape[1], (batch, kv_heads, 1, dim)
    if not (
        values.shape == cache_shape
        and degree.shape == (batch, layers, kv_heads, capacity)
        and q.shape == (batch, heads, 1, dim)
        and k.shape == v.shape == new_shape
        and fill.shape == active.shape == (batch,)
        and heads % kv_heads == dim % 8 == 0
        and dim <= MAX_HEAD_DIM
        and 0 <= layer < layers
    ):
        shapes = [tuple(t.shape) for t in (q, k, v, keys, values, degree, fill, active)]
        raise ValueError(f"cannot serve layer {layer} with q, k, v, keys, values, degree, fill, active of {shapes}")
    if not (k.dtype == v.dtype == keys.dtype == values.dtype == q.dtype):
        raise ValueError(f"q, k, v, keys, values must share one dtype, got {q.dtype} q and {keys.dtype} keys")
    if (degree.dtype, fill.dtype, active.dtype) != (torch.float32, torch.int64, torch.bool):
        raise ValueError(
            f"degree must be float32, fill int64 and active bool, got {degree.dtype}, {fill.dtype}, {active.dtype}"
        )
    if not (keys.is_contiguous() and values.is_contiguous() and degree.is_contiguous()):
        raise ValueError("keys, values and degree must be contiguous: the kernel writes to them in place")
    parts = splits(batch * kv_heads, capacity, multiprocessors(q.device))
    return _decode(q, k, v, keys, values, degree, fill, active, layer, scale, parts)


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    degree: Tensor,
    fill: Tensor,
    active: Tensor,
    layer: int,
    scale: float,
    parts: int,
) -> Tensor:
    """Launch `decode_attention` with the slots of a KV head cut into `parts`."""
    batch, layers, kv_heads, capacity, dim = keys.shape
    heads = q.shape[1]
    group = heads // kv_heads
    q, k, v = _in_rows(q), _in_rows(k), _in_rows(v)
    out = q.new_empty(batch, 1, heads, dim)
    partial, lse = out, out  # not touched by the kernel that is not split
    if parts > 1:
        partial = torch.empty(batch * kv_heads, parts, group, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch * kv_heads, parts, group, dtype=torch.float32, device=q.device)
    blocks = decode_blocks(dim, q.element_size())
    with torch.cuda.device_of(q):
        _decode_kernel[(batch * kv_heads, parts)](
            q, k, v, keys, values, degree, fill.contiguous(), active.contiguous(), out, partial, lse,
            scale * _LOG2_E, layer, layers, kv_heads, group, capacity, parts,
            q.stride(0) // dim, q.stride(1) // dim,
            k.stride(0) // dim, k.stride(1) // dim,
            v.stride(0) // dim, v.stride(1) // dim,
            HEAD_DIM=dim, BLOCK_D=blocks.d, BLOCK_G=max(blocks.m, triton.next_power_of_2(group)), BLOCK_N=blocks.n,
            SPLIT=parts > 1, num_warps=blocks.num_warps, num_stages=blocks.num_stages,
        )  # fmt: skip
        if parts > 1:
            _combine_kernel[(batch * heads,)](
                partial, lse, out, group, parts,
                HEAD_DIM=dim, BLOCK_D=blocks.d, BLOCK_S=COMBINE.n,
                num_warps=COMBINE.num_warps, num_stages=COMBINE.num_stages,
            )  # fmt: skip
    return out.transpose(1, 2)


def extend_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, degree: Tensor, used: int, scale: float
) -> Tensor:
    """Attends with S new tokens of one row over its used slots, and causally over the tokens themselves.

    The cache is only read.

    Args:
        q: queries [H, S, D]; D is a multiple of 8, at most 256.
        k: new keys [Hkv, S, D]; query head h uses KV head h // (H // Hkv).
        v: new values [Hkv, S, D].
        keys: cached keys [Hkv, C, D] in the dtype of q; any stride between heads.
        values: cached values, likewise.
        degree: float32 [Hkv, C]; 0 marks an empty slot, which counts for nothing.
        used: the slots to read.
        scale: factor of the scores.

    Returns:
        The attention output [H, S, D] in the dtype of q, laid out as [S, H, D].
    """
    heads, steps, dim = q.shape
    q, k, v, keys, values = (_in_rows(tensor) for tensor in (q, k, v, keys, values))
    out = q.new_empty(steps, heads, dim)
    blocks = extend_blocks(dim, q.element_size())
    with torch.cuda.device_of(q):
        _extend_kernel[(triton.cdiv(steps, blocks.m), heads)](
            q, k, v, keys, values, degree, out,
            scale * _LOG2_E, steps, used, heads, heads // k.shape[0],
            q.stride(0) // dim, q.stride(1) // dim,
            k.stride(0) // dim, k.stride(1) // dim,
            v.stride(0) // dim, v.stride(1) // dim,
            keys.stride(0) // dim, keys.stride(1) // dim,
            values.stride(0) // dim, values.stride(1) // dim,
            degree.stride(0), degree.stride(1),
            HEAD_DIM=dim, BLOCK_D=blocks.d, BLOCK_M=blocks.m, BLOCK_N=blocks.n,
            num_warps=blocks.num_warps, num_stages=blocks.num_stages,
        )  # fmt: skip
    return out.transpose(0, 1)


def _in_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` such that its strides are whole rows of D elements, as views of a projection are already.

    The kernels multiply by the constant D last, which is what lets the compiler prove 128-bit alignment.
    """
    *strides, unit = tensor.stride()
    dim = tensor.shape[-1]
    return tensor if unit == 1 and all(stride % dim == 0 for stride in strides) else tensor.contiguous()


@triton.jit
def _attend_tile(acc, peak, total, q, k, v, bias, seen, scale):  # type: ignore[no-untyped-def]
    """Fold a tile of slots into the running softmax: acc [M, D], its maximum peak [M] and weight total [M].

    k, v [N, D]; bias [1, N] is added to the scores; where `seen` (broadcast to [M, N]) is false, a slot has no weight.
    """
    if INTERPRETED:
        q, k = q.to(tl.float32), k.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale + bias
    scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # nothing seen so far: -inf - -inf would be NaN
    rescale = tl.exp2(peak - base)
    weight = tl.exp2(scores - base[:, None])
    total = total * rescale + tl.sum(weight, axis=1)
    weight = weight.to(v.dtype)
    if INTERPRETED:
        weight, v = weight.to(tl.float32), v.to(tl.float32)
    acc = tl.dot(weight, v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit(
    do_not_specialize=[
        "degree_ptr", "fill_ptr", "active_ptr", "layer", "layers", "kv_heads", "group", "capacity", "splits",
        "q_row", "q_head", "k_row", "k_head", "v_row", "v_head",
    ]
)  # fmt: skip
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, degree_ptr, fill_ptr, active_ptr, out_ptr, partial_ptr, lse_ptr,
    scale, layer, layers, kv_heads, group, capacity, splits,
    q_row, q_head, k_row, k_head, v_row, v_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One program serves one split of one KV head of one batch row. Strides count rows of HEAD_DIM elements.

    Split 0 appends the new token and begins its softmax with it from registers, so nothing that this launch writes
    is read in it: every slot that is loaded lies below fill.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    b, kv_head = (head // kv_heads).to(tl.int64), head % kv_heads
    d, g, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N)
    in_d, in_g = d < HEAD_DIM, (g < group)[:, None]
    in_gd = in_g if BLOCK_D == HEAD_DIM else in_g & in_d[None, :]
    first_slot = ((b * layers + layer) * kv_heads + kv_head) * capacity

    live = tl.load(active_ptr + b).to(tl.int32) != 0  # the interpreter loads a bool as a byte, which is no mask
    fill = tl.load(fill_ptr + b).to(tl.int32)
    used = tl.where(live, tl.minimum(fill, capacity), 0)
    share = tl.cdiv(tl.cdiv(used, BLOCK_N), splits) * BLOCK_N
    start = split * share
    stop = tl.minimum(start + share, used)

    q_rows = b * q_row + (kv_head * group + g) * q_head
    q = tl.load(q_ptr + q_rows[:, None] * HEAD_DIM + d[None, :], mask=in_gd, other=0.0)
    appends = live & (split == 0)
    in_new = d < tl.where(appends, HEAD_DIM, 0)
    new_k = tl.load(k_ptr + (b * k_row + kv_head * k_head) * HEAD_DIM + d, mask=in_new, other=0.0)
    new_v = tl.load(v_ptr + (b * v_row + kv_head * v_head) * HEAD_DIM + d, mask=in_new, other=0.0)
    if appends & (fill < capacity):
        new_slot = first_slot + fill
        tl.store(keys_ptr + new_slot * HEAD_DIM + d, new_k, mask=in_d)
        tl.store(values_ptr + new_slot * HEAD_DIM + d, new_v, mask=in_d)
        tl.store(degree_ptr + new_slot, 1.0)

    new_score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], axis=1) * scale
    peak = tl.where(appends, new_score, float("-inf"))
    total = tl.where(appends, tl.full([BLOCK_G], 1.0, tl.float32), 0.0)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32) + new_v.to(tl.float32)[None, :]  # zero where it does not append

    tile = n[:, None] * HEAD_DIM + d[None, :]
    for slot in range(start, stop, BLOCK_N):
        in_n = slot + n < stop
        weight = tl.load(degree_ptr + first_slot + slot + n, mask=in_n, other=0.0)
        taken = weight > 0.0
        mask = in_n[:, None] if BLOCK_D == HEAD_DIM else in_n[:, None] & in_d[None, :]
        k = tl.load(keys_ptr + (first_slot + slot) * HEAD_DIM + tile, mask=mask, other=0.0)
        v = tl.load(values_ptr + (first_slot + slot) * HEAD_DIM + tile, mask=mask, other=0.0)
        v = tl.where(taken[:, None], v, 0.0)  # not a mask of the load, which would wait for the load of the degree
        bias, seen = tl.log2(weight)[None, :], taken[None, :]
        acc, peak, total = _attend_tile(acc, peak, total, q, k, v, bias, seen, scale)

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    query = head.to(tl.int64) * group + g  # [B, H] flattened
    if SPLIT:
        # An empty split leaves its part of the scratch undefined and says so by its weight, 2^-inf.
        query = (head.to(tl.int64) * splits + split) * group + g
        tl.store(lse_ptr + query, tl.where(total > 0.0, peak + tl.log2(total), float("-inf")), mask=g < group)
        in_gd &= (total > 0.0)[:, None]
        tl.store(partial_ptr + query[:, None] * HEAD_DIM + d[None, :], acc, mask=in_gd)
    else:
        tl.store(out_ptr + query[:, None] * HEAD_DIM + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=in_gd)


@triton.jit(do_not_specialize=["group", "splits"])
def _combine_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, lse_ptr, out_ptr, group, splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program adds up the splits of one query head: partial [B * Hkv, splits, G, D], lse [B * Hkv, splits, G]."""
    query = tl.program_id(0)
    d, s = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
    in_d = d < HEAD_DIM
    first = (query // group).to(tl.int64) * splits * group + query % group
    peak, total = float("-inf"), 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, splits, BLOCK_S):
        in_s = start + s < splits
        part = first + (start + s) * group
        lse = tl.load(lse_ptr + part, mask=in_s, other=float("-inf"))
        in_sd = in_s[:, None] & in_d[None, :]
        value = tl.load(partial_ptr + part[:, None] * HEAD_DIM + d[None, :], mask=in_sd, other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, axis=0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        rescale, weight = tl.exp2(peak - base), tl.exp2(lse - base)
        value = tl.where((weight > 0.0)[:, None], value, 0.0)  # what an empty split left there may be NaN
        acc = acc * rescale + tl.sum(weight[:, None] * value, axis=0)
        total = total * rescale + tl.sum(weight, axis=0)
        peak = new_peak
    acc = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + query.to(tl.int64) * HEAD_DIM + d, acc.to(out_ptr.dtype.element_ty), mask=in_d)


@triton.jit(
    do_not_specialize=[
        "degree_ptr", "steps", "used", "heads", "group", "q_head", "q_step", "k_head", "k_step", "v_head", "v_step",
        "keys_head", "keys_slot", "values_head", "values_slot", "degree_head", "degree_slot",
    ]
)  # fmt: skip
def _extend_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, degree_ptr, out_ptr, scale, steps, used, heads, group,
    q_head, q_step, k_head, k_step, v_head, v_step,
    keys_head, keys_slot, values_head, values_slot, degree_head, degree_slot,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program serves BLOCK_M queries of one head. Strides count rows of HEAD_DIM elements, those of degree one."""
    head = tl.program_id(1)
    kv_head = (head // group).to(tl.int64)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest rows start first
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    m = first + tl.arange(0, BLOCK_M)
    in_d, in_m = (d < HEAD_DIM)[None, :], (m < steps)[:, None]
    in_md = in_m if BLOCK_D == HEAD_DIM else in_m & in_d
    q_rows = head.to(tl.int64) * q_head + m.to(tl.int64) * q_step
    q = tl.load(q_ptr + q_rows[:, None] * HEAD_DIM + d[None, :], mask=in_md, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    # Offsets inside a tile fit 32 bits and stay the same; only the scalar in front of them moves.
    keys_tile = (n * keys_slot)[:, None] * HEAD_DIM + d[None, :]
    values_tile = (n * values_slot)[:, None] * HEAD_DIM + d[None, :]
    for start in range(0, used, BLOCK_N):
        slot = tl.cast(start, tl.int64)
        in_n = start + n < used
        weight = tl.load(degree_ptr + kv_head * degree_head + slot * degree_slot + n * degree_slot, in_n, other=0.0)
        taken = weight > 0.0
        k_mask = in_n[:, None] if BLOCK_D == HEAD_DIM else in_n[:, None] & in_d
        # Not tl.where as in decode: wgmma takes V from shared memory, just as it was loaded.
        v_mask = taken[:, None] if BLOCK_D == HEAD_DIM else taken[:, None] & in_d
        k_tile = keys_ptr + (kv_head * keys_head + slot * keys_slot) * HEAD_DIM + keys_tile
        v_tile = values_ptr + (kv_head * values_head + slot * values_slot) * HEAD_DIM + values_tile
        k = tl.load(k_tile, mask=k_mask, other=0.0)
        v = tl.load(v_tile, mask=v_mask, other=0.0)
        bias, seen = tl.log2(weight)[None, :], taken[None, :]
        acc, peak, total = _attend_tile(acc, peak, total, q, k, v, bias, seen, scale)

    k_tile = (n * k_step)[:, None] * HEAD_DIM + d[None, :]
    v_tile = (n * v_step)[:, None] * HEAD_DIM + d[None, :]
    for start in range(0, tl.minimum(first + BLOCK_M, steps), BLOCK_N):
        token = tl.cast(start, tl.int64)
        in_n = (start + n < steps)[:, None]
        mask = in_n if BLOCK_D == HEAD_DIM else in_n & in_d
        k = tl.load(k_ptr + (kv_head * k_head + token * k_step) * HEAD_DIM + k_tile, mask=mask, other=0.0)
        v = tl.load(v_ptr + (kv_head * v_head + token * v_step) * HEAD_DIM + v_tile, mask=mask, other=0.0)
        seen = (start + n)[None, :] <= m[:, None]
        acc, peak, total = _attend_tile(acc, peak, total, q, k, v, 0.0, seen, scale)

    out_rows = m.to(tl.int64) * heads + head
    acc = acc / total[:, None]  # a query sees itself at least
    tl.store(out_ptr + out_rows[:, None] * HEAD_DIM + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=in_md)


def builds() -> list[Build]:
    """Return every specialisation that ships: all kernels in all dtypes and the head sizes of common models.

    The decode kernel serves groups of up to 16 query heads; a larger one is compiled on first use.
    """
    return [build for dtype in POINTERS for dim in HEAD_DIMS for build in _builds(dtype, dim)]


def _builds(dtype: torch.dtype, dim: int) -> Iterator[Build]:
    pointer = POINTERS[dtype]
    name = f"{pointer[1:]}-D{dim}"
    decode, extend = decode_blocks(dim, dtype.itemsize), extend_blocks(dim, dtype.itemsize)
    head = {"HEAD_DIM": dim, "BLOCK_D": decode.d}
    scratch = {"partial_ptr": "*fp32", "lse_ptr": "*fp32"}
    for split in (False, True):
        yield Build(
            f"decode{'-split' if split else ''}-{name}",
            _decode_kernel,
            signature(_decode_kernel, _KNOWN | (scratch if split else {}), pointer),
            head | {"BLOCK_G": decode.m, "BLOCK_N": decode.n, "SPLIT": split},
            decode.num_warps,
            decode.num_stages,
        )
    yield Build(
        f"combine-{name}",
        _combine_kernel,
        signature(_combine_kernel, scratch, pointer),
        head | {"BLOCK_S": COMBINE.n},
        COMBINE.num_warps,
        COMBINE.num_stages,
    )
    yield Build(
        f"extend-{name}",
        _extend_kernel,
        signature(_extend_kernel, _KNOWN, pointer),
        head | {"BLOCK_M": extend.m, "BLOCK_N": extend.n},
        extend.num_warps,
        extend.num_stages,
    )
