"""The custom ops that capture and passes put into a graph.

`ckv::attention` is the attention of a model before it has a cache: one node a layer that says all there is to know.
`ckv::update` is where a model hands its keys and values to a `ClusteredCache` of its own, in a graph of Dynamo's.
`ckv::cached_attention` appends a step's keys and values to one layer of the clustered cache, takes its queries into
their running means and among the last ones, and attends;
`ckv::window_attention` does so for a layer with a sliding window, whose last tokens are kept exactly; `ckv::compact_`
closes the step for all layers of a group. These three change the tensors of `CacheState` in place, and their schemas
say so; so does `ckv::append_`, which only appends, for a model that attends to a prompt by itself; it takes in the
queries if it is told them.

Where keys and values have 8 bits, `degree` holds their steps too (see `slots`). A single new token is rounded before
its query attends to it; several attend to each other first, and are rounded when they are stored.

Batch row b of every argument belongs to batch row b of the state; a row that is not active is left as it is. Of several
new tokens, the first `padding[b]` of a row are skipped. A batch of one new token a row may be of any rows of a larger
state: `rows` [B] names them, no active one twice.

All attend by softmax(cap(q.k * scale) + log degree), where cap(s) = softcap * tanh(s / softcap) unless softcap is 0.
`sinks` [H] are learned logits that take part in the softmax of a head and have no value.

On CUDA the work is done by the Triton kernels, and one new token a row (S = 1) never waits for the device. Under
Triton's interpreter (TRITON_INTERPRET=1) tensors on the CPU take the same way.
"""

import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ckv_compile import clustering, slots
from ckv_compile.cache import CacheShape
from ckv_compile.errors import InputError
from ckv_compile.kernels import cpu
from ckv_compile.reference import accumulator_dtype
from ckv_compile.schedule import Schedule

EXTEND_BLOCK = 512
"""Queries per block when a prompt or turn needs an explicit mask: bounds it to [block, cache + new]."""

_TOGETHER = 2**20
"""Numbers of the keys of the layers that PyTorch compacts at once, so that their copies stay in a CPU's cache."""

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

_library = torch.library.Library("ckv", "DEF")
_PLAN = "int budget, int n_sink, int n_recent, int chunk_size, float r_init, float r_decay, float r_min, int n_exact=0"
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, float scale, float softcap=0.0, "
    "int window=0) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) degree, "
    "Tensor(d!) queries, Tensor(e!) last_queries, Tensor fill, Tensor active, Tensor position, int layer, float scale, "
    f"Tensor? sinks, float softcap, {_PLAN}, Tensor? padding=None, Tensor? rows=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "window_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor position, "
    "Tensor active, int layer, float scale, Tensor? sinks, float softcap, Tensor? padding=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "compact_(Tensor(a!) keys, Tensor(b!) values, Tensor(c!) degree, Tensor queries, Tensor last_queries, "
    f"Tensor(d!) fill, Tensor active, Tensor(e!)? position, SymInt tokens, {_PLAN}, Tensor? padding=None, "
    "Tensor? rows=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "update(Tensor k, Tensor v, Tensor keys, Tensor values, Tensor degree, Tensor queries, Tensor last_queries, "
    "Tensor fill, Tensor active, Tensor position, Tensor window_keys, Tensor window_values, Tensor light_keys, "
    "Tensor light_values, Tensor light_degree, Tensor light_queries, Tensor light_last_queries, Tensor light_fill, "
    f"int layer, str group, {_PLAN}) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "append_(Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) degree, Tensor(d!) queries, "
    "Tensor(e!) last_queries, Tensor fill, Tensor active, Tensor position, Tensor(f!) window_keys, "
    "Tensor(g!) window_values, Tensor(h!) light_keys, Tensor(i!) light_values, Tensor(j!) light_degree, "
    f"Tensor(k!) light_queries, Tensor(l!) light_last_queries, Tensor light_fill, int layer, str group, {_PLAN}, "
    "Tensor? padding=None, Tensor? q=None, float scale=1.0) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _attention(
    q: Tensor,  # [B, H, S, D]
    k: Tensor,  # [B, Hkv, S, D]
    v: Tensor,  # [B, Hkv, S, D]
    mask: Tensor | None,  # [B or 1, 1, S, S] bool or additive; None is causal
    sinks: Tensor | None,  # [H]
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:
    """Attention as it stands in a captured graph. With no mask, query i sees the last `window` of tokens 0..i, or all.

    It runs in `transform`, to compare the rewritten graph with, and keeps scores [S, S].
    """
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = mask.triu(1 - window) if window else mask
    bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else mask
    bias = bias.expand(q.shape[0], *bias.shape[-3:]) if bias.ndim == 4 else bias.expand(q.shape[0], 1, *bias.shape)
    return torch.stack([_attend(*row, scale, softcap, sinks) for row in zip(q, k, v, bias, strict=True)])


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention of one row: q [H, S, D] over k, v [Hkv, n, D] with an additive bias [H or 1, S or 1, n]."""
    if sinks is not None:  # a slot of key and value zero, biased by the logit of each head
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        bias = F.pad(bias.expand(q.shape[0], -1, -1), (0, 1))
        bias[:, :, -1] = sinks[:, None]
    if not softcap:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], bias[None], scale=scale, enable_gqa=True)[0]
    wide, group = accumulator_dtype(q.dtype), q.shape[0] // k.shape[0]
    k, v = (tensor.to(wide).repeat_interleave(group, dim=0) for tensor in (k, v))
    scores = softcap * torch.tanh(q.to(wide) @ k.mT * (scale / softcap)) + bias
    return (scores.softmax(dim=-1) @ v).to(q.dtype)


def _cached_attention(
    q: Tensor,  # [B, H, S, D]
    k: Tensor,  # [B, Hkv, S, D]
    v: Tensor,  # [B, Hkv, S, D]
    keys: Tensor,  # [B, L, Hkv, C, D]
    values: Tensor,  # [B, L, Hkv, C, D]
    degree: Tensor,  # [B, L, Hkv, C], or [B, L, Hkv, C, 3] where keys and values are int8
    queries: Tensor,  # [B, L, Hkv, 2, D]
    last_queries: Tensor,  # [B, L, Hkv, LAST, G, D]
    fill: Tensor,  # [B]
    active: Tensor,  # [B]
    position: Tensor,  # [B]
    layer: int,
    scale: float,
    sinks: Tensor | None,  # [H]
    softcap: float,
    budget: int,
    n_sink: int,
    n_recent: int,
    chunk_size: int,
    r_init: float,
    r_decay: float,
    r_min: float,
    n_exact: int = 0,
    padding: Tensor | None = None,  # [B]
    rows: Tensor | None = None,  # [B]
) -> Tensor:
    if q.shape[2] == 1:
        state = (keys, values, degree, queries, last_queries, fill, active, position)
        return _decode(q, k, v, *state, layer, scale, softcap, sinks, rows)
    _check_rows(rows, q.shape[2])
    schedule = Schedule(budget, n_sink, n_recent, chunk_size, r_init, r_decay, r_min, n_exact)
    out, seen = _empty_output(q), position.tolist()
    for b, used, skip in _rows(fill, active, padding, q.shape[2]):
        out[b, :, :skip] = 0.0
        if skip < q.shape[2]:
            new = (q[b, :, skip:], k[b, :, skip:], v[b, :, skip:])
            own = (keys[b, layer], values[b, layer], degree[b, layer])
            known = (queries[b, layer], last_queries[b, layer])
            out[b, :, skip:] = _extend(*new, *own, used, scale, softcap, sinks)
            clustering.observe_(*known, new[0], scale, seen[b])
            _append(*new[1:], *own, *known, used, schedule)
    return out


def _window_attention(
    q: Tensor,  # [B, H, S, D]
    k: Tensor,  # [B, Hkv, S, D]
    v: Tensor,  # [B, Hkv, S, D]
    keys: Tensor,  # [B, Lw, Hkv, W, D]
    values: Tensor,  # [B, Lw, Hkv, W, D]
    position: Tensor,  # [B]
    active: Tensor,  # [B]
    layer: int,
    scale: float,
    sinks: Tensor | None,  # [H]
    softcap: float,
    padding: Tensor | None = None,  # [B]
) -> Tensor:
    if q.shape[2] == 1:
        state = (keys, values, None, None, None, position, active, None)
        return _decode(q, k, v, *state, layer, scale, softcap, sinks)
    out, window = _empty_output(q), keys.shape[3]
    for b, seen, skip in _rows(position, active, padding, q.shape[2]):
        out[b, :, :skip] = 0.0
        if skip < q.shape[2]:
            new = (q[b, :, skip:], k[b, :, skip:], v[b, :, skip:])
            ring = (keys[b, layer], values[b, layer])
            out[b, :, skip:] = _extend(*new, *ring, None, seen, scale, softcap, sinks, window)
            _append_to_ring(*new[1:], *ring, seen)
    return out


def _new_attention_fake(q: Tensor, *_: object, **__: object) -> Tensor:
    return _empty_output(q)


def _update(*_: object) -> tuple[Tensor, Tensor]:
    raise InputError(
        'a ClusteredCache is updated in a compiled graph that the backend "ckv" has not seen: compile the forward that '
        'gets the cache by torch.compile(model.forward, backend="ckv"), and no other backend around it'
    )


def _update_fake(k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(k), torch.empty_like(v)


def _append_(
    k: Tensor,  # [B, Hkv, S, D]
    v: Tensor,  # [B, Hkv, S, D]
    keys: Tensor,
    values: Tensor,
    degree: Tensor,
    queries: Tensor,
    last_queries: Tensor,
    fill: Tensor,
    active: Tensor,
    position: Tensor,
    window_keys: Tensor,
    window_values: Tensor,
    light_keys: Tensor,
    light_values: Tensor,
    light_degree: Tensor,
    light_queries: Tensor,
    light_last_queries: Tensor,
    light_fill: Tensor,
    layer: int,  # of its group
    group: str,  # see cache.Group
    budget: int,
    n_sink: int,
    n_recent: int,
    chunk_size: int,
    r_init: float,
    r_decay: float,
    r_min: float,
    n_exact: int = 0,
    padding: Tensor | None = None,  # [B]
    q: Tensor | None = None,  # [B, H, S, D]
    scale: float = 1.0,
) -> None:
    schedule = Schedule(budget, n_sink, n_recent, chunk_size, r_init, r_decay, r_min, n_exact)
    counts = {"main": fill, "light": light_fill, "window": position}[group]
    for b, count, skip in _rows(counts, active, padding, k.shape[2]):
        if skip == k.shape[2]:
            continue
        new = (k[b, :, skip:], v[b, :, skip:])
        if group == "window":
            _append_to_ring(*new, window_keys[b, layer], window_values[b, layer], count)
        else:
            main = (keys, values, degree, queries, last_queries)
            light = (light_keys, light_values, light_degree, light_queries, light_last_queries)
            own = [part[b, layer] for part in (light if group == "light" else main)]
            if q is not None:
                clustering.observe_(own[3], own[4], q[b, :, skip:], scale, int(position[b]))
            _append(*new, own[0], own[1], own[2], own[3], own[4], count, schedule)


def _append_fake(*_: object, **__: object) -> None:
    return None


def _rows(counts: Tensor, active: Tensor, padding: Tensor | None, steps: int) -> Iterator[tuple[int, int, int]]:
    """Each row with its count and the tokens of `steps` that it skips, all of them where it is not active."""
    skips = [0] * len(counts) if padding is None else padding.tolist()
    for b, (count, takes_tokens, skip) in enumerate(zip(counts.tolist(), active.tolist(), skips, strict=True)):
        yield b, count, skip if takes_tokens else steps


def _check_rows(rows: Tensor | None, steps: int) -> None:
    if rows is not None and steps != 1:
        raise ValueError(f"{steps} tokens a row, and rows of a larger state: pass the state of these rows instead")


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

        for head_dim in {shape.head_dim, shape.window_head_dim or shape.head_dim}:
            compaction.check(shape.dtype, head_dim, schedule)


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
    rows: Tensor | None = None,
) -> Tensor:
    """One new token per row. With nothing but keys and values the slots are a ring: `fill` counts the tokens seen."""
    state = (keys, values, degree, queries, last_queries, fill, active, position)
    arguments = (q, k, v, *state, layer, scale, softcap, sinks, rows)
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
    rows: Tensor | None = None,
) -> Tensor:
    """`_decode` in PyTorch: the form that the C++ kernel is tested against and falls back to."""
    heads, dim, kv_heads, capacity = q.shape[1], q.shape[3], k.shape[1], keys.shape[3]
    out = _empty_output(q)
    fills, takes = fill.tolist(), active.tolist()
    states = range(len(fills)) if rows is None else rows.tolist()
    taking = [(b, state, fills[state]) for b, state in enumerate(states) if takes[state]]
    for _, state, used in taking:
        if degree is not None and used >= capacity:
            raise RuntimeError(f"the cache of batch row {state} is full: {used} of {capacity} slots are in use")
    if len(taking) < q.shape[0]:
        out.zero_()
    for b, state, used in taking:
        slot, taken = used % capacity, slice(0, min(used + 1, capacity))
        # The G query heads of a KV head stand side by side as rows of one query, so K and V are read once.
        grouped = q[b].reshape(kv_heads, heads // kv_heads, dim)
        bias = q.new_zeros(kv_heads, 1, taken.stop, dtype=accumulator_dtype(q.dtype))
        if degree is not None and queries is not None and last_queries is not None and position is not None:
            known = (queries[state, layer], last_queries[state, layer])
            clustering.observe_(*known, q[b], scale, int(position[state]))
            own = (keys[state, layer], values[state, layer], degree[state, layer])
            slots.write_((k[b], v[b], 1.0), *(part[:, slot : slot + 1] for part in own))
            old_keys, old_values, weights = slots.read(*(part[:, taken] for part in own))
            bias = bias.to(accumulator_dtype(old_keys.dtype))
            bias[:, 0] = weights.to(bias.dtype).log()
        else:
            keys[state, layer, :, slot] = k[b, :, 0]
            values[state, layer, :, slot] = v[b, :, 0]
            old_keys, old_values = keys[state, layer, :, taken], values[state, layer, :, taken]
        if sinks is None and not softcap:
            attended = F.scaled_dot_product_attention(
                grouped.to(old_keys.dtype)[None], old_keys[None], old_values[None], bias[None], scale=scale
            )
        else:
            bias = bias.repeat_interleave(heads // kv_heads, dim=0)  # [H, 1, n]
            attended = _attend(q[b].to(old_keys.dtype), old_keys, old_values, bias, scale, softcap, sinks)
        out[b] = attended.reshape(heads, 1, dim)
    return out


def _extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    degree: Tensor | None,
    used: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    window: int = 0,
) -> Tensor:
    """Attention of S new tokens [H, S, D] of one row over its slots and causally over themselves.

    With a window the slots are a ring, which has seen `used` tokens; without, `used` of them are taken.
    """
    if used == 0 and not softcap and sinks is None and (not window or q.shape[1] <= window):
        if not q.is_cuda:
            # The CPU's flash kernel is faster on contiguous, repeated heads; they live for one layer only.
            group = q.shape[0] // k.shape[0]
            k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
        return F.scaled_dot_product_attention(
            q.contiguous()[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=q.is_cuda
        )[0]
    if keys.dtype == torch.int8 and degree is not None:
        wide = slots.read(keys[:, :used], values[:, :used], degree[:, :used])
        keys, values, degree = wide[0].to(q.dtype), wide[1].to(q.dtype), wide[2]
    if _has_triton(q.device):
        from ckv_compile.kernels import attention

        return attention.extend_attention(q, k, v, keys, values, degree, used, scale, softcap, sinks, window)
    return _extend_attention(q, k, v, keys, values, degree, used, scale, softcap, sinks, window)


def _extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    degree: Tensor | None,
    used: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    window: int = 0,
) -> Tensor:
    """`_extend` where a mask must be spelled out, in PyTorch."""
    steps, group = q.shape[1], q.shape[0] // k.shape[0]
    wide = accumulator_dtype(q.dtype)
    if window:
        used, first = min(used, window), used % window if used > window else 0
        keys, values = (tensor.roll(-first, dims=1) for tensor in (keys, values))  # oldest first
    if used:
        k, v = (torch.cat([old[:, :used], new], dim=1) for old, new in ((keys, k), (values, v)))
    log_degree = (
        None if degree is None else degree[:, :used].to(wide).log().repeat_interleave(group, dim=0)
    )  # [H, used]
    out = torch.empty_like(q)
    for start in range(0, steps, EXTEND_BLOCK):
        stop = min(start + EXTEND_BLOCK, steps)
        first = max(0, used + start + 1 - window) if window else 0  # no query of the block sees slots before it
        seen = torch.ones(stop - start, used + stop - first, dtype=torch.bool, device=q.device)
        seen = seen.tril(used + start - first)
        seen = seen.triu(used + start - first + 1 - window) if window else seen
        bias = torch.zeros_like(seen, dtype=wide).masked_fill(~seen, float("-inf"))[None]
        if log_degree is not None:
            bias = bias.repeat(q.shape[0], 1, 1)
            bias[:, :, :used] = log_degree[:, None]
        block = slice(first, used + stop)
        out[:, start:stop] = _attend(q[:, start:stop], k[:, block], v[:, block], bias, scale, softcap, sinks)
    return out


def _append(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    degree: Tensor,
    queries: Tensor,
    last_queries: Tensor,
    used: int,
    schedule: Schedule,
) -> None:
    """Put S new tokens [Hkv, S, D] of one row behind its `used` slots, compressed when they leave no free slot."""
    total, capacity = used + k.shape[1], keys.shape[1]
    if schedule.settle(total, capacity) == total:
        slots.write_((k, v, 1.0), keys[:, used:total], values[:, used:total], degree[:, used:total])
        return
    if keys.dtype == torch.int8:  # rounded once, when they are stored
        k, v = k.float(), v.float()
    old = slots.read(keys[:, :used], values[:, :used], degree[:, :used])
    merged = compress(
        torch.cat([old[0], k], dim=1) if used else k,
        torch.cat([old[1], v], dim=1) if used else v,
        torch.cat([old[2], degree.new_ones(k.shape[:2])], dim=1),
        queries,
        last_queries,
        schedule,
    )
    _store(merged, keys, values, degree)


def _append_to_ring(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, seen: int) -> None:
    """Put S new tokens [Hkv, S, D] of one row into a ring [Hkv, W, D] that has seen `seen`."""
    steps, window = k.shape[1], keys.shape[1]
    last = min(steps, window)
    places = torch.arange(seen + steps - last, seen + steps, device=k.device) % window
    keys.index_copy_(1, places, k[:, -last:])
    values.index_copy_(1, places, v[:, -last:])


def compress(
    keys: Tensor, values: Tensor, degree: Tensor, queries: Tensor, last_queries: Tensor, schedule: Schedule
) -> tuple[Tensor, Tensor, Tensor]:
    """Bring rows to the budget after a prompt or turn: exact slots to the front, then rounds on the rest.

    Args:
        keys, values: [R, n, D].
        degree: [R, n] float32, all positive.
        queries: [R, 2, D]: see `clustering.observe_`.
        last_queries: [R, LAST, G, D]: likewise.
        schedule: the plan.

    Returns:
        keys, values [R, budget, D] and degree [R, budget]; the rows as they are if they are within the budget.
    """
    row, rounds = (keys, values, degree), schedule.rounds(keys.shape[1])
    if rounds and schedule.n_exact:
        row = clustering.set_apart(*row, queries, last_queries, schedule)
    if _has_triton(keys.device):
        from ckv_compile.kernels import compaction

        return compaction.compress(*row, rounds, schedule)
    return clustering.compress(*row, rounds, schedule)


def _store(merged: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor, degree: Tensor) -> None:
    """Write merged slots [R, m, D] to the front of a state of as many rows [..., C, D], and mark the rest empty."""
    count, at, capacity = merged[0].shape[1], keys.ndim - 2, keys.shape[-2]
    k, v, n = (part.view(*keys.shape[:at], *part.shape[1:]) for part in merged)
    slots.write_((k, v, n), *(part.narrow(at, 0, count) for part in (keys, values, degree)))
    degree.narrow(at, count, capacity - count).zero_()


def _compact(
    keys: Tensor,
    values: Tensor,
    degree: Tensor,
    queries: Tensor,
    last_queries: Tensor,
    fill: Tensor,
    active: Tensor,
    position: Tensor | None,  # None: another group of the state counts it
    tokens: int,
    budget: int,
    n_sink: int,
    n_recent: int,
    chunk_size: int,
    r_init: float,
    r_decay: float,
    r_min: float,
    n_exact: int = 0,
    padding: Tensor | None = None,
    rows: Tensor | None = None,
) -> None:
    _check_rows(rows, tokens)
    schedule = Schedule(budget, n_sink, n_recent, chunk_size, r_init, r_decay, r_min, n_exact)
    capacity = keys.shape[3]
    layers = keys.shape[1]
    if tokens == 1 and layers and _has_triton(keys.device):
        from ckv_compile.kernels import compaction

        # The kernel counts both; where another group counts the position, it counts one that nobody reads.
        seen = torch.empty_like(fill) if position is None else position
        compaction.compact(keys, values, degree, queries, last_queries, fill, seen, active, schedule, rows)
        return
    taken = (tokens if padding is None else tokens - padding) * active
    if rows is not None:
        taken = torch.zeros_like(taken).index_copy_(0, rows, taken[rows])
    total = fill + taken
    if tokens == 1 and layers:  # after several tokens the layers have compressed themselves
        for b in (total == capacity).nonzero().flatten().tolist():
            together = max(1, _TOGETHER // keys[b, 0].numel())
            for first in range(0, layers, together):
                some = slice(first, first + together)
                state = (keys[b, some], values[b, some], degree[b, some])
                k, v, weight = (part.flatten(0, 1) for part in slots.read(*state))  # [layers * Hkv, ...]
                if n_exact:
                    known = (queries[b, some].flatten(0, 1), last_queries[b, some].flatten(0, 1))
                    k, v, weight = clustering.exchange(k, v, weight, *known, schedule)
                _store(clustering.compress(k, v, weight, (capacity - budget,), schedule), *state)
    fill.copy_(torch.where(total < capacity, total, budget))
    if position is not None:
        position += taken


def _compact_fake(*_: object, **__: object) -> None:
    return None


for _device in ("CPU", "CUDA"):
    _library.impl("attention", _attention, _device)
    _library.impl("cached_attention", _cached_attention, _device)
    _library.impl("window_attention", _window_attention, _device)
    _library.impl("compact_", _compact, _device)
    _library.impl("update", _update, _device)
    _library.impl("append_", _append_, _device)
torch.library.register_fake("ckv::attention", _attention_fake, lib=_library)
torch.library.register_fake("ckv::cached_attention", _new_attention_fake, lib=_library)
torch.library.register_fake("ckv::window_attention", _new_attention_fake, lib=_library)
torch.library.register_fake("ckv::compact_", _compact_fake, lib=_library)
torch.library.register_fake("ckv::update", _update_fake, lib=_library)
torch.library.register_fake("ckv::append_", _append_fake, lib=_library)

attention = torch.ops.ckv.attention.default
cached_attention = torch.ops.ckv.cached_attention.default
window_attention = torch.ops.ckv.window_attention.default
compact_ = torch.ops.ckv.compact_.default
update = torch.ops.ckv.update.default
append_ = torch.ops.ckv.append_.default
