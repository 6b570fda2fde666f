"""The Triton kernels of attention over a KV cache: one decode step, and a turn of several tokens.

The slots of a cache are clusters, or a ring:

- A slot of degree n is weighed by softmax(q.k * scale + log n). One of degree 0 is empty and may hold anything, NaN
  included: its score and its value are replaced, since a weight of 0 would not stop a NaN.
- A ring of C slots serves a layer with a sliding window of C tokens exactly. Token t is kept in slot t % C, where it
  takes the place of the token that has just left the window.

Either way scores can be capped, to softcap * tanh(score / softcap), and a head can have a sink: a logit that takes part
in its softmax and has no value. All is in base 2: scores and sinks are scaled by log2(e) and a degree adds log2(n), so
that every weight is exp2(score - running maximum) <= 1 and fits float16 at any degree.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from ckv_compile.reference import LAST, RECENT
from ckv_compile.slots import STORED

MAX_HEAD_DIM = 256
"""Largest head that the tiles are laid out for."""

MIN_SPLIT = 128
"""Least slots of a split: fewer cost more to combine than they save."""

_KNOWN = {"fill_ptr": "*i64", "position_ptr": "*i64", "active_ptr": "*i1", "rows_ptr": "*i64"}
_KNOWN |= dict.fromkeys(("scale", "softcap", "query_scale"), "fp32")
"""Types of arguments."""

_LOG2_E = 1.4426950408889634
LOG2_E = tl.constexpr(_LOG2_E)
_RECENT, _LAST, _STORED = tl.constexpr(RECENT), tl.constexpr(LAST), tl.constexpr(STORED)


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
    degree: Tensor | None,
    queries: Tensor | None,
    last_queries: Tensor | None,
    fill: Tensor,
    active: Tensor,
    position: Tensor | None,
    layer: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Appends one token to every active row of one layer, and attends over all slots used so far.

    Nothing waits for the device: `fill`, `active` and `position` are read there. The time follows the fill, not the
    capacity. The result of a row has the same bits whatever its neighbours hold, given the number of splits (see
    `splits`).

    Args:
        q: queries [B, H, 1, D]; D is a multiple of 8, at most 256.
        k: new keys [B, Hkv, 1, D]; query head h uses KV head h // (H // Hkv).
        v: new values [B, Hkv, 1, D].
        keys: cached keys [B, L, Hkv, C, D], contiguous, in the dtype of q, or int8 (see `slots`); slot `fill` is
            written, of a ring slot `fill` % C.
        values: cached values, likewise.
        degree: float32 [B, L, Hkv, C], contiguous; 0 marks an empty slot, which counts for nothing. With int8 keys and
            values [B, L, Hkv, C, 3]. None: the slots are a ring of the last C tokens, and the query sees its own and
            the C - 1 before it.
        queries: float32 [B, L, Hkv, 2, D], contiguous: the running means of scale * q and of its square, into which
            the queries of a token that is written are taken (see `reference.observe`). None for a ring.
        last_queries: [B, L, Hkv, LAST, G, D] in the dtype of q, contiguous: scale * q of the last tokens; place
            `position` % LAST of a token that is written is. None for a ring.
        fill: int64 [B]: used slots of each row, before this token; of a ring, all tokens before it. A row with no free
            slot is not written; a ring always has one.
        active: bool [B]: a row that is not active is left as it is, and its output is zero.
        position: int64 [B]: tokens of each row before this one. None for a ring.
        layer: the layer to serve.
        scale: factor of the scores.
        softcap: scores become softcap * tanh(score / softcap) before the degree enters; 0 leaves them.
        sinks: [H] in the dtype of q: a logit of each query head that takes part in its softmax and has no value.
        rows: int64 [B]: the row of the state that each row of the batch is of, read on the device; keys, values,
            degree, queries, last_queries, fill, active and position may then have more rows. No two active ones are
            the same. None: row b is of row b.

    Returns:
        The attention output [B, H, 1, D] in the dtype of q, laid out as [B, 1, H, D].

    Raises:
        ValueError: if shapes, dtypes or memory layouts do not fit together.
    """
    states, layers, kv_heads, capacity, dim = cache_shape = keys.shape
    batch = states if rows is None else len(rows)
    heads, new_shape = q.shape[1], (batch, kv_heads, 1, dim)
    last_shape = (states, layers, kv_heads, LAST, heads // kv_heads, dim)
    int8 = keys.dtype == values.dtype == torch.int8 and degree is not None
    degree_shape = (*cache_shape[:4], *([STORED] if int8 else []))
    if not (
        values.shape == cache_shape
        and (degree is None or degree.shape == degree_shape)
        and (queries is None or queries.shape == (states, layers, kv_heads, 2, dim))
        and (last_queries is None or last_queries.shape == last_shape)
        and q.shape == (batch, heads, 1, dim)
        and k.shape == v.shape == new_shape
        and fill.shape == active.shape == (states,)
        and (position is None or position.shape == (states,))
        and (rows is None or (rows.shape, rows.dtype) == ((batch,), torch.int64))
        and heads % kv_heads == dim % 8 == 0
        and dim <= MAX_HEAD_DIM
        and 0 <= layer < layers
    ):
        tensors = (q, k, v, keys, values, degree, queries, last_queries, fill, active, position, rows)
        shapes = [None if tensor is None else tuple(tensor.shape) for tensor in tensors]
        names = "q, k, v, keys, values, degree, queries, last_queries, fill, active, position, rows"
        raise ValueError(f"cannot serve layer {layer} with {names} of {shapes}")
    if len({part is None for part in (degree, queries, last_queries, position)}) > 1:
        raise ValueError("degree, queries, last_queries, position must all be given, or for a ring none")
    alike = [q, k, v, keys, values, *(() if last_queries is None else (last_queries,))]
    if len({tensor.dtype for tensor in alike if not (int8 and tensor.dtype == torch.int8)}) > 1:
        dtypes = ", ".join(str(tensor.dtype) for tensor in alike)
        raise ValueError(f"q, k, v, keys, values, last_queries must share one dtype, got {dtypes}")
    written = [tensor for tensor in (degree, queries) if tensor is not None]
    counters = [tensor for tensor in (fill, position) if tensor is not None]
    kinds = [tensor.dtype for tensor in (*written, *counters, active)]
    if kinds != [torch.float32] * len(written) + [torch.int64] * len(counters) + [torch.bool]:
        raise ValueError(f"degree, queries must be float32, fill, position int64 and active bool, got {kinds}")
    if not all(tensor.is_contiguous() for tensor in (*alike[3:], *written)):
        raise ValueError(
            "keys, values, degree, queries, last_queries must be contiguous: the kernel writes to them in place"
        )
    _check_scores(q, heads, softcap, sinks)
    parts = splits(batch * kv_heads, capacity, multiprocessors(q.device))
    state = (keys, values, degree, queries, last_queries, fill, active, position)
    return _decode(q, k, v, *state, layer, scale, softcap, sinks, parts, rows)


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    degree: Tensor | None,
    queries: Tensor | None,
    last_queries: Tensor | None,
    fill: Tensor,
    active: Tensor,
    position: Tensor | None,
    layer: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    parts: int,
    rows: Tensor | None = None,
) -> Tensor:
    """Launch `decode_attention` with the slots of a KV head cut into `parts`."""
    _, layers, kv_heads, capacity, dim = keys.shape
    batch, heads = q.shape[:2]
    group = heads // kv_heads
    q, k, v = _in_rows(q), _in_rows(k), _in_rows(v)
    out = q.new_empty(batch, 1, heads, dim)
    partial, lse = out, out  # neither is touched by the kernel that is not split, nor `out` in place of what is None
    if parts > 1:
        partial = torch.empty(batch * kv_heads, parts, group, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch * kv_heads, parts, group, dtype=torch.float32, device=q.device)
    blocks = decode_blocks(dim, q.element_size())
    launch(_decode_kernel, (batch * kv_heads, parts))(
        q, k, v, keys, values, out if degree is None else degree, out if queries is None else queries,
        out if last_queries is None else last_queries, fill.contiguous(), active.contiguous(),
        fill if position is None else position.contiguous(), fill if rows is None else rows.contiguous(),
        out if sinks is None else sinks.contiguous(), out, partial, lse,
        *_in_base_2(scale, softcap), scale, layer, layers, kv_heads, group, capacity, parts,
        q.stride(0) // dim, q.stride(1) // dim,
        k.stride(0) // dim, k.stride(1) // dim,
        v.stride(0) // dim, v.stride(1) // dim,
        HEAD_DIM=dim, BLOCK_D=blocks.d, BLOCK_G=max(blocks.m, triton.next_power_of_2(group)), BLOCK_N=blocks.n,
        RING=degree is None, SOFTCAP=softcap > 0.0, SINKS=sinks is not None, SPLIT=parts > 1, ROWS=rows is not None,
        INT8=degree is not None and keys.dtype == torch.int8,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip
    if parts > 1:
        launch(_combine_kernel, (batch * heads,))(
            partial, lse, out, group, parts,
            HEAD_DIM=dim, BLOCK_D=blocks.d, BLOCK_S=COMBINE.n,
            num_warps=COMBINE.num_warps, num_stages=COMBINE.num_stages,
        )  # fmt: skip
    return out.transpose(1, 2)


def extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    degree: Tensor | None,
    used: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Attends with S new tokens of one row over its used slots, and causally over the tokens themselves.

    The cache is only read; where `used` is 0, it may hold anything and be of any size.

    Args:
        q: queries [H, S, D]; D is a multiple of 8, at most 256.
        k: new keys [Hkv, S, D]; query head h uses KV head h // (H // Hkv).
        v: new values [Hkv, S, D].
        keys: cached keys [Hkv, C, D] in the dtype of q; any stride between heads.
        values: cached values, likewise.
        degree: float32 [Hkv, C]; 0 marks an empty slot, which counts for nothing. None: the slots are a ring of the
            last C tokens, or none is used.
        used: the slots to read; of a ring, all tokens before these.
        scale: factor of the scores.
        softcap: scores become softcap * tanh(score / softcap) before the degree enters; 0 leaves them.
        sinks: [H] in the dtype of q: a logit of each query head that takes part in its softmax and has no value.
        window: a query sees its own token and the window - 1 before it, cached or new; 0: all. A ring has C = window.

    Returns:
        The attention output [H, S, D] in the dtype of q, laid out as [S, H, D].

    Raises:
        ValueError: if a window comes with degrees, or with a ring of another size.
    """
    heads, steps, dim = q.shape
    _check_scores(q, heads, softcap, sinks)
    if window < 0 or (window and degree is not None) or (used and degree is None and window != keys.shape[1]):
        kind = "a ring" if degree is None else "clusters"
        raise ValueError(f"a window of {window} tokens cannot be seen in {kind} of {keys.shape[1]} slots, {used} used")
    window = window or steps  # of the new tokens, which are all that is there when nothing limits the window of a ring
    slots, next_slot = (min(used, window), used % window) if degree is None else (used, 0)
    q, k, v, keys, values = (_in_rows(tensor) for tensor in (q, k, v, keys, values))
    out = q.new_empty(steps, heads, dim)
    blocks = extend_blocks(dim, q.element_size())
    launch(_extend_kernel, (triton.cdiv(steps, blocks.m), heads))(
        q, k, v, keys, values, out if degree is None else degree, out if sinks is None else sinks.contiguous(), out,
        *_in_base_2(scale, softcap), steps, slots, next_slot, window, heads, heads // k.shape[0],
        q.stride(0) // dim, q.stride(1) // dim,
        k.stride(0) // dim, k.stride(1) // dim,
        v.stride(0) // dim, v.stride(1) // dim,
        keys.stride(0) // dim, keys.stride(1) // dim,
        values.stride(0) // dim, values.stride(1) // dim,
        *((0, 0) if degree is None else degree.stride()),
        HEAD_DIM=dim, BLOCK_D=blocks.d, BLOCK_M=blocks.m, BLOCK_N=blocks.n,
        RING=degree is None, SOFTCAP=softcap > 0.0, SINKS=sinks is not None,
        num_warps=blocks.num_warps, num_stages=blocks.num_stages,
    )  # fmt: skip
    return out.transpose(0, 1)


def _check_scores(q: Tensor, heads: int, softcap: float, sinks: Tensor | None) -> None:
    if softcap < 0.0:
        raise ValueError(f"softcap must be positive, or 0 for none, got {softcap}")
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype != q.dtype):
        raise ValueError(f"sinks must be {heads} of {q.dtype}, got {tuple(sinks.shape)} of {sinks.dtype}")


def _in_base_2(scale: float, softcap: float) -> tuple[float, float]:
    """Return what the kernels take as scale and softcap: see `_score`."""
    return (scale / softcap, softcap * _LOG2_E) if softcap else (scale * _LOG2_E, 0.0)


def _in_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` such that its strides are whole rows of D elements, as views of a projection are already.

    The kernels multiply by the constant D last, which is what lets the compiler prove 128-bit alignment.
    """
    *strides, unit = tensor.stride()
    dim = tensor.shape[-1]
    return tensor if unit == 1 and all(stride % dim == 0 for stride in strides) else tensor.contiguous()


@triton.jit
def _score(product, scale, softcap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Score in base 2 of a product q.k: product * scale, or softcap * tanh(product * scale).

    tanh from exp2, which every target has: (1 - e) / (1 + e) with e = exp(-2 |x|) <= 1, so that nothing overflows; near
    0, where 1 - e would cancel, its series, whose next term is less than a rounding there.
    """
    score = product * scale
    if SOFTCAP:
        size, square = tl.abs(score), score * score
        e = tl.exp2(size * -2.8853900817779268)  # -2 log2(e)
        far = (1.0 - e) / (1.0 + e)
        far = tl.where(score < 0.0, -far, far)
        series = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315)))
        score = tl.where(size < 0.2, score * series, far) * softcap
    return score


@triton.jit
def _attend_tile(  # type: ignore[no-untyped-def]
    acc, peak, total, q, k, v, bias, seen, scale, softcap, SOFTCAP: tl.constexpr
):  # fmt: skip
    """Fold a tile of slots into the running softmax: acc [M, D], its maximum peak [M] and weight total [M].

    k, v [N, D]; bias [1, N] is added to the scores; where `seen` (broadcast to [M, N]) is false, a slot has no weight.
    """
    if INTERPRETED:
        q, k = q.to(tl.float32), k.to(tl.float32)
    scores = _score(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, softcap, SOFTCAP) + bias
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


@triton.jit
def _take_into_mean(mean_ptr, new, mask):  # type: ignore[no-untyped-def]
    """Let a running mean over RECENT tokens take in one more."""
    old = tl.load(mean_ptr, mask=mask, other=0.0)
    tl.store(mean_ptr, old + (new - old) / _RECENT, mask=mask)


@triton.jit(
    do_not_specialize=[
        "degree_ptr", "queries_ptr", "fill_ptr", "active_ptr", "position_ptr", "rows_ptr", "sinks_ptr",
        "layer", "layers", "kv_heads", "group", "capacity", "splits",
        "q_row", "q_head", "k_row", "k_head", "v_row", "v_head",
    ]
)  # fmt: skip
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, degree_ptr, queries_ptr, last_queries_ptr,
    fill_ptr, active_ptr, position_ptr, rows_ptr, sinks_ptr, out_ptr, partial_ptr, lse_ptr,
    scale, softcap, query_scale, layer, layers, kv_heads, group, capacity, splits,
    q_row, q_head, k_row, k_head, v_row, v_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr,
    RING: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    INT8: tl.constexpr,
):  # fmt: skip
    """One program serves one split of one KV head of one batch row. Strides count rows of HEAD_DIM elements.

    Split 0 appends the new token and begins its softmax with it and the sink from registers, so nothing that this
    launch writes is read in it: the slot of the new token is not loaded. Among clusters it lies behind all that are; in
    a full ring it lies between them, and the token that it holds has left the window. The means of the queries are
    read and written by split 0 alone, and so are the last queries.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    b, kv_head = (head // kv_heads).to(tl.int64), head % kv_heads
    d, g, n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N)
    in_d, in_g = d < HEAD_DIM, (g < group)[:, None]
    in_gd = in_g if BLOCK_D == HEAD_DIM else in_g & in_d[None, :]
    stored: tl.constexpr = _STORED if INT8 else 1  # numbers of a slot beside the degrees
    state = tl.load(rows_ptr + b) if ROWS else b
    row = (state * layers + layer) * kv_heads + kv_head
    first_slot = row * capacity

    live = tl.load(active_ptr + state).to(tl.int32) != 0  # the interpreter loads a bool as a byte, which is no mask
    tokens = tl.load(fill_ptr + state)
    fill = tl.minimum(tokens, capacity).to(tl.int32)
    used = tl.where(live, fill, 0)
    share = tl.cdiv(tl.cdiv(used, BLOCK_N), splits) * BLOCK_N
    start = split * share
    stop = tl.minimum(start + share, used)

    q_rows = b * q_row + (kv_head * group + g) * q_head
    q = tl.load(q_ptr + q_rows[:, None] * HEAD_DIM + d[None, :], mask=in_gd, other=0.0)
    appends = live & (split == 0)
    in_new = d < tl.where(appends, HEAD_DIM, 0)
    new_k = tl.load(k_ptr + (b * k_row + kv_head * k_head) * HEAD_DIM + d, mask=in_new, other=0.0)
    new_v = tl.load(v_ptr + (b * v_row + kv_head * v_head) * HEAD_DIM + d, mask=in_new, other=0.0)
    new_slot, writes = fill, appends & (fill < capacity)
    if RING:
        new_slot, writes = (tokens % capacity).to(tl.int32), appends
    if INT8:  # the query attends to what the slot will hold
        new_k, new_v = new_k.to(tl.float32), new_v.to(tl.float32)
        k_step, v_step = step_of(largest_of(new_k, 0)), step_of(largest_of(new_v, 0))
        new_k, new_v = whole_numbers(new_k, k_step), whole_numbers(new_v, v_step)
    if writes:
        tl.store(keys_ptr + (first_slot + new_slot) * HEAD_DIM + d, new_k.to(keys_ptr.dtype.element_ty), mask=in_d)
        tl.store(values_ptr + (first_slot + new_slot) * HEAD_DIM + d, new_v.to(values_ptr.dtype.element_ty), mask=in_d)
        if INT8:
            tl.store(degree_ptr + (first_slot + new_slot) * stored + 1, k_step)
            tl.store(degree_ptr + (first_slot + new_slot) * stored + 2, v_step)
        if not RING:
            tl.store(degree_ptr + first_slot * stored + new_slot * stored, 1.0)
            scaled = q.to(tl.float32) * query_scale  # 0 in the rows of the tile behind the group
            _take_into_mean(queries_ptr + row * 2 * HEAD_DIM + d, tl.sum(scaled, axis=0) / group, in_d)
            _take_into_mean(queries_ptr + (row * 2 + 1) * HEAD_DIM + d, tl.sum(scaled * scaled, axis=0) / group, in_d)
            newest = (row * _LAST + tl.load(position_ptr + state) % _LAST) * group + g
            scaled = scaled.to(last_queries_ptr.dtype.element_ty)
            tl.store(last_queries_ptr + newest[:, None] * HEAD_DIM + d[None, :], scaled, mask=in_gd)

    if INT8:
        new_k, new_v = new_k * k_step, new_v * v_step
    peak = _score(tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], axis=1), scale, softcap, SOFTCAP)
    total = tl.full([BLOCK_G], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32) + new_v.to(tl.float32)[None, :]  # zero where it does not append
    if SINKS:
        sink = tl.load(sinks_ptr + kv_head * group + g, mask=g < group, other=0.0).to(tl.float32) * LOG2_E
        new_peak = tl.maximum(peak, sink)
        share_of_new = tl.exp2(peak - new_peak)
        peak, total, acc = new_peak, share_of_new + tl.exp2(sink - new_peak), acc * share_of_new[:, None]
    peak = tl.where(appends, peak, float("-inf"))
    total = tl.where(appends, total, 0.0)

    tile = n[:, None] * HEAD_DIM + d[None, :]
    for slot in range(start, stop, BLOCK_N):
        in_n = slot + n < stop
        if RING:
            in_n &= slot + n != new_slot
        mask = in_n[:, None] if BLOCK_D == HEAD_DIM else in_n[:, None] & in_d[None, :]
        bias, taken = 0.0, in_n
        if not RING:
            weight = tl.load(degree_ptr + first_slot * stored + slot * stored + n * stored, mask=in_n, other=0.0)
            bias, taken = tl.log2(weight)[None, :], weight > 0.0
        k = tl.load(keys_ptr + (first_slot + slot) * HEAD_DIM + tile, mask=mask, other=0.0)
        v = tl.load(values_ptr + (first_slot + slot) * HEAD_DIM + tile, mask=mask, other=0.0)
        if INT8:
            k_steps = tl.load(degree_ptr + (first_slot + slot) * stored + 1 + n * stored, mask=in_n, other=0.0)
            v_steps = tl.load(degree_ptr + (first_slot + slot) * stored + 2 + n * stored, mask=in_n, other=0.0)
            k = (k.to(tl.float32) * k_steps[:, None]).to(q.dtype)
            v = (v.to(tl.float32) * v_steps[:, None]).to(q.dtype)
        if not RING:
            v = tl.where(taken[:, None], v, 0.0)  # not a mask of the load, which would wait for the load of the degree
        acc, peak, total = _attend_tile(acc, peak, total, q, k, v, bias, taken[None, :], scale, softcap, SOFTCAP)

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
        "degree_ptr", "sinks_ptr", "steps", "used", "next_slot", "window", "heads", "group",
        "q_head", "q_step", "k_head", "k_step", "v_head", "v_step",
        "keys_head", "keys_slot", "values_head", "values_slot", "degree_head", "degree_slot",
    ]
)  # fmt: skip
def _extend_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, degree_ptr, sinks_ptr, out_ptr,
    scale, softcap, steps, used, next_slot, window, heads, group,
    q_head, q_step, k_head, k_step, v_head, v_step,
    keys_head, keys_slot, values_head, values_slot, degree_head, degree_slot,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    RING: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One program serves BLOCK_M queries of one head. Strides count rows of HEAD_DIM elements, those of degree one.

    `used` slots are in use. Of a ring, which has as many slots as `window` has tokens, `next_slot` is the slot that the
    next token takes; `window` and it serve a ring only.
    """
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
    if SINKS:
        peak = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total += 1.0
    if RING:
        used = tl.where(first + 1 < window, used, 0)  # else the newest of the cached tokens has left every window

    # Offsets inside a tile fit 32 bits and stay the same; only the scalar in front of them moves.
    keys_tile = (n * keys_slot)[:, None] * HEAD_DIM + d[None, :]
    values_tile = (n * values_slot)[:, None] * HEAD_DIM + d[None, :]
    for start in range(0, used, BLOCK_N):
        slot = tl.cast(start, tl.int64)
        in_n = start + n < used
        if RING:
            age = next_slot - start - n  # how many tokens before query 0
            age = tl.where(age > 0, age, age + window)
            bias, taken, seen = 0.0, in_n, in_n[None, :] & (m[:, None] + age[None, :] < window)
        else:
            weight = tl.load(degree_ptr + kv_head * degree_head + slot * degree_slot + n * degree_slot, in_n, other=0.0)
            taken = weight > 0.0
            bias, seen = tl.log2(weight)[None, :], taken[None, :]
        k_mask = in_n[:, None] if BLOCK_D == HEAD_DIM else in_n[:, None] & in_d
        # Not tl.where as in decode: wgmma takes V from shared memory, just as it was loaded.
        v_mask = taken[:, None] if BLOCK_D == HEAD_DIM else taken[:, None] & in_d
        k_tile = keys_ptr + (kv_head * keys_head + slot * keys_slot) * HEAD_DIM + keys_tile
        v_tile = values_ptr + (kv_head * values_head + slot * values_slot) * HEAD_DIM + values_tile
        k = tl.load(k_tile, mask=k_mask, other=0.0)
        v = tl.load(v_tile, mask=v_mask, other=0.0)
        acc, peak, total = _attend_tile(acc, peak, total, q, k, v, bias, seen, scale, softcap, SOFTCAP)

    k_tile = (n * k_step)[:, None] * HEAD_DIM + d[None, :]
    v_tile = (n * v_step)[:, None] * HEAD_DIM + d[None, :]
    oldest = 0
    if RING:
        oldest = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N  # the tile of the first query's oldest token
    for start in range(oldest, tl.minimum(first + BLOCK_M, steps), BLOCK_N):
        token = tl.cast(start, tl.int64)
        in_n = (start + n < steps)[:, None]
        mask = in_n if BLOCK_D == HEAD_DIM else in_n & in_d
        k = tl.load(k_ptr + (kv_head * k_head + token * k_step) * HEAD_DIM + k_tile, mask=mask, other=0.0)
        v = tl.load(v_ptr + (kv_head * v_head + token * v_step) * HEAD_DIM + v_tile, mask=mask, other=0.0)
        seen = (start + n)[None, :] <= m[:, None]
        if RING:
            seen &= m[:, None] - (start + n)[None, :] < window
        acc, peak, total = _attend_tile(acc, peak, total, q, k, v, 0.0, seen, scale, softcap, SOFTCAP)

    out_rows = m.to(tl.int64) * heads + head
    acc = (
        acc / tl.where(total > 0.0, total, 1.0)[:, None]
    )  # a query sees itself, but rows past the last may see nothing
    tl.store(out_ptr + out_rows[:, None] * HEAD_DIM + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=in_md)


class Variant(NamedTuple):
    """What a layer asks of the kernels: their flags of the same names."""

    ring: bool = False
    softcap: bool = False
    sinks: bool = False
    int8: bool = False  # of the decode kernel alone

    @property
    def suffix(self) -> str:
        return "".join(f"-{name}" for name, asked in self._asdict().items() if asked)


def builds() -> list[Build]:
    """Return every specialisation that ships: all kernels in all dtypes and the head sizes of common models.

    Caps and sinks ship in bfloat16, for the head sizes that models have them with; rings in bfloat16, and for heads of
    128 in all dtypes.
    Slots of 8 bits ship for bfloat16. The decode kernel serves groups of up to 16 query heads. What is beyond that is
    compiled on first use.
    """
    return [build for dtype in POINTERS for dim in HEAD_DIMS for build in _builds(dtype, dim)]


def _variants(dtype: torch.dtype, dim: int) -> Iterator[Variant]:
    yield Variant()
    if dtype == torch.bfloat16 or dim == 128:
        yield Variant(ring=True)
    if dtype == torch.bfloat16:
        yield Variant(int8=True)
        for ring in (False, True):
            if dim == 64:
                yield Variant(ring, sinks=True)
            elif dim >= 128:
                yield Variant(ring, softcap=True)


def _builds(dtype: torch.dtype, dim: int) -> Iterator[Build]:
    pointer = POINTERS[dtype]
    name = f"{pointer[1:]}-D{dim}"
    decode, extend = decode_blocks(dim, dtype.itemsize), extend_blocks(dim, dtype.itemsize)
    head = {"HEAD_DIM": dim, "BLOCK_D": decode.d}
    scratch = {"partial_ptr": "*fp32", "lse_ptr": "*fp32"}
    for variant in _variants(dtype, dim):
        known = _KNOWN if variant.ring else _KNOWN | {"degree_ptr": "*fp32", "queries_ptr": "*fp32"}
        flags = {flag.upper(): asked for flag, asked in variant._asdict().items()}
        slots = dict.fromkeys(("keys_ptr", "values_ptr"), INT8) if variant.int8 else {}
        for split in (False, True):
            yield Build(
                f"decode{'-split' if split else ''}{variant.suffix}-{name}",
                _decode_kernel,
                signature(_decode_kernel, known | slots | (scratch if split else {}), pointer),
                head | {"BLOCK_G": decode.m, "BLOCK_N": decode.n, "SPLIT": split, "ROWS": False} | flags,
                decode.num_warps,
                decode.num_stages,
            )
        if variant.int8:  # it is given what the slots hold
            continue
        del flags["INT8"]
        yield Build(
            f"extend{variant.suffix}-{name}",
            _extend_kernel,
            signature(_extend_kernel, known, pointer),
            head | {"BLOCK_M": extend.m, "BLOCK_N": extend.n} | flags,
            extend.num_warps,
            extend.num_stages,
        )
    yield Build(
        f"combine-{name}",
        _combine_kernel,
        signature(_combine_kernel, scratch, pointer),
        head | {"BLOCK_S": COMBINE.n},
        COMBINE.num_warps,
        COMBINE.num_stages,
    )
