"""The two custom ops that the passes put into a graph.

`ckv::cached_attention` appends a step's keys and values to one layer of the cache and attends; `ckv::compact_` closes
the step for all layers. Both change the state tensors of `CacheState` in place, and their schemas say so. Batch row b
of every argument belongs to batch row b of the state; a row that is not active is left as it is.

On CUDA the work is done by the Triton kernels, and one new token a row (S = 1) never waits for the device. Under
Triton's interpreter (TRITON_INTERPRET=1) tensors on the CPU take the same way.
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor

from ckv_compile import clustering
from ckv_compile.cache import CacheShape
from ckv_compile.kernels import cpu
from ckv_compile.reference import accumulator_dtype
from ckv_compile.schedule import Schedule

EXTEND_BLOCK = 512
"""Queries per block when a long turn attends to a filled cache: bounds the mask to [block, cache + new]."""

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_library = torch.library.Library("ckv", "DEF")
_PLAN = "int budget, int n_sink, int n_recent, int chunk_size, float r_init, float r_decay, float r_min"
_library.define(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) degree, "
    f"Tensor fill, Tensor active, int layer, float scale, {_PLAN}) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "compact_(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) degree, Tensor(d!) fill, Tensor active, "
    f"Tensor(e!) position, SymInt tokens, {_PLAN}) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _cached_attention(
    q: Tensor,  # [B, H, S, D]
    k: Tensor,  # [B, Hkv, S, D]
    v: Tensor,  # [B, Hkv, S, D]
    keys: Tensor,  # [B, L, Hkv, C, D]
    values: Tensor,  # [B, L, Hkv, C, D]
    degree: Tensor,  # [B, L, Hkv, C]
    fill: Tensor,  # [B]
    active: Tensor,  # [B]
    layer: int,
    scale: float,
    budget: int,
    n_sink: int,
    n_recent: int,
    chunk_size: int,
    r_init: float,
    r_decay: float,
    r_min: float,
) -> Tensor:
    if q.shape[2] == 1:
        return _decode(q, k, v, keys, values, degree, fill, active, layer, scale)
    schedule = Schedule(budget, n_sink, n_recent, chunk_size, r_init, r_decay, r_min)
    out = _empty_output(q)
    for b, (used, takes_tokens) in enumerate(zip(fill.tolist(), active.tolist(), strict=True)):
        if not takes_tokens:
            out[b] = 0.0
            continue
        slots = (keys[b, layer], values[b, layer], degree[b, layer])
        out[b] = _extend(q[b], k[b], v[b], *slots, used, scale)
        _append(k[b], v[b], *slots, used, schedule)
    return out


def _cached_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, degree: Tensor, fill: Tensor, *_: object
) -> Tensor:
    return _empty_output(q)


def _empty_output(q: Tensor) -> Tensor:
    """[B, H, S, D] laid out as [B, S, H, D] in memory: the output projection reads it without a copy."""
    batch, heads, steps, dim = q.shape
    return q.new_empty(batch, steps, heads, dim).transpose(1, 2)


def _has_triton(device: torch.device) -> bool:
    return device.type == "cuda" or _INTERPRETED


def check_kernels(shape: CacheShape, schedule: Schedule) -> None:
    """Refuse what the kernels of a device cannot serve.

    Raises:
        ConfigError: for a dtype, a head size or a chunk size that the Triton kernels have no tiles for.
    """
    if _has_triton(shape.device):
        from ckv_compile.kernels import compaction

        compaction.check(shape.dtype, shape.head_dim, schedule)


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
) -> Tensor:
    """One new token per row."""
    arguments = (q, k, v, keys, values, degree, fill, active, layer, scale)
    if _has_triton(q.device):
        from ckv_compile.kernels import attention  # Triton is there where CUDA is

        return attention.decode_attention(*arguments)
    if q.shape[3] % 8 == 0 and cpu.is_available(q.dtype):
        return cpu.decode_attention(*arguments)
    return _decode_attention(*arguments)


def _decode_attention(
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
    """One new token per row, in PyTorch: the form that the C++ kernel is tested against and falls back to."""
    heads, dim, kv_heads = q.shape[1], q.shape[3], k.shape[1]
    out = _empty_output(q)
    rows = [(b, used) for b, (used, takes) in enumerate(zip(fill.tolist(), active.tolist(), strict=True)) if takes]
    for b, used in rows:
        if used >= keys.shape[3]:
            raise RuntimeError(f"the cache of batch row {b} is full: {used} of {keys.shape[3]} slots are in use")
    if len(rows) < q.shape[0]:
        out.zero_()
    for b, used in rows:
        keys[b, layer, :, used] = k[b, :, 0]
        values[b, layer, :, used] = v[b, :, 0]
        degree[b, layer, :, used] = 1.0
        seen = slice(0, used + 1)
        # The G query heads of a KV head stand side by side as rows of one query, so K and V are read once.
        grouped = q[b].reshape(kv_heads, heads // kv_heads, dim)
        bias = degree[b, layer, :, None, seen].to(accumulator_dtype(q.dtype)).log()  # [Hkv, 1, n]
        out[b] = F.scaled_dot_product_attention(
            grouped[None], keys[b, layer, :, seen][None], values[b, layer, :, seen][None], bias[None], scale=scale
        ).reshape(heads, 1, dim)
    return out


def _extend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, degree: Tensor, used: int, scale: float
) -> Tensor:
    """Attention of S new tokens [H, S, D] of one row over its `used` slots and causally over themselves."""
    if used == 0:
        if not q.is_cuda:
            # The CPU's flash kernel is faster on contiguous, repeated heads; they live for one layer only.
            group = q.shape[0] // k.shape[0]
            k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
        return F.scaled_dot_product_attention(
            q.contiguous()[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=q.is_cuda
        )[0]
    if _has_triton(q.device):
        from ckv_compile.kernels import attention

        return attention.extend_attention(q, k, v, keys, values, degree, used, scale)
    return _extend_attention(q, k, v, keys, values, degree, used, scale)


def _extend_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, degree: Tensor, used: int, scale: float
) -> Tensor:
    """`_extend` on a cache that holds slots, in PyTorch."""
    steps, group = q.shape[1], q.shape[0] // k.shape[0]
    all_keys = torch.cat([keys[:, :used], k], dim=1)[None]  # [1, Hkv, used + S, D]
    all_values = torch.cat([values[:, :used], v], dim=1)[None]
    log_degree = degree[:, :used].to(accumulator_dtype(q.dtype)).log().repeat_interleave(group, dim=0)  # [H, used]
    out = torch.empty_like(q)
    for start in range(0, steps, EXTEND_BLOCK):
        stop = min(start + EXTEND_BLOCK, steps)
        bias = log_degree.new_zeros(q.shape[0], stop - start, used + stop)
        bias[:, :, :used] = log_degree[:, None]
        future = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).triu(start + 1)
        bias[:, :, used:].masked_fill_(future, float("-inf"))
        out[:, start:stop] = F.scaled_dot_product_attention(
            q[None, :, start:stop],
            all_keys[:, :, : used + stop],
            all_values[:, :, : used + stop],
            bias[None],
            scale=scale,
            enable_gqa=True,
        )[0]
    return out


def _append(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, degree: Tensor, used: int, schedule: Schedule) -> None:
    """Put S new tokens [Hkv, S, D] of one row behind its `used` slots, compressed when they leave no free slot."""
    total, capacity = used + k.shape[1], keys.shape[1]
    if schedule.settle(total, capacity) == total:
        keys[:, used:total] = k
        values[:, used:total] = v
        degree[:, used:total] = 1.0
        return
    merged = _compress(
        torch.cat([keys[:, :used], k], dim=1) if used else k,
        torch.cat([values[:, :used], v], dim=1) if used else v,
        torch.cat([degree[:, :used], degree.new_ones(k.shape[:2])], dim=1),
        schedule.rounds(total),
        schedule,
    )
    _store(merged, keys, values, degree)


def _compress(
    keys: Tensor, values: Tensor, degree: Tensor, rounds: tuple[int, ...], schedule: Schedule
) -> tuple[Tensor, Tensor, Tensor]:
    if _has_triton(keys.device):
        from ckv_compile.kernels import compaction

        return compaction.compress(keys, values, degree, rounds, schedule)
    return clustering.compress(keys, values, degree, rounds, schedule)


def _store(merged: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor, degree: Tensor) -> None:
    """Write merged slots to the front of a row's [Hkv, C, D] and mark the rest empty."""
    count = merged[0].shape[1]
    keys[:, :count], values[:, :count], degree[:, :count] = merged
    degree[:, count:] = 0.0


def _compact(
    keys: Tensor,
    values: Tensor,
    degree: Tensor,
    fill: Tensor,
    active: Tensor,
    position: Tensor,
    tokens: int,
    budget: int,
    n_sink: int,
    n_recent: int,
    chunk_size: int,
    r_init: float,
    r_decay: float,
    r_min: float,
) -> None:
    schedule = Schedule(budget, n_sink, n_recent, chunk_size, r_init, r_decay, r_min)
    capacity = keys.shape[3]
    if tokens == 1 and _has_triton(keys.device):
        from ckv_compile.kernels import compaction

        compaction.compact(keys, values, degree, fill, position, active, schedule)
        return
    taken = tokens * active
    total = fill + taken
    if tokens == 1:  # after several tokens the layers have compressed themselves
        for b in (total == capacity).nonzero().flatten().tolist():
            for layer in range(keys.shape[1]):
                slots = (keys[b, layer], values[b, layer], degree[b, layer])
                _store(clustering.compress(*slots, (capacity - budget,), schedule), *slots)
    fill.copy_(torch.where(total < capacity, total, budget))
    position += taken


def _compact_fake(*_: object) -> None:
    return None


for _device in ("CPU", "CUDA"):
    _library.impl("cached_attention", _cached_attention, _device)
    _library.impl("compact_", _compact, _device)
torch.library.register_fake("ckv::cached_attention", _cached_attention_fake, lib=_library)
torch.library.register_fake("ckv::compact_", _compact_fake, lib=_library)

cached_attention = torch.ops.ckv.cached_attention.default
compact_ = torch.ops.ckv.compact_.default
