"""Exact slots and chunked soft matching over many rows at once: the PyTorch form that the ops run on the CPU.

The same method as in `reference.py`, with many rows, of one layer or several, in one batch. Rows are
independent: a row's result does not depend on its neighbours.
"""

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ckv_compile.reference import (
    ATTENTION_WEIGHT,
    LAST,
    LEAST_ATTENTION,
    LEAST_DEVIATION,
    NEAR,
    QUERY_WEIGHT,
    RECENT,
    VALUE_WEIGHT,
    accumulator_dtype,
    attended_slots,
)
from ckv_compile.schedule import Schedule


def observe_(queries: Tensor, last: Tensor, q: Tensor, scale: float, position: int) -> None:
    """Take in the queries of new tokens of one layer, in place.

    Args:
        queries: [Hkv, 2, D] float32 or float64: running means of s = scale * q, and of its square.
        last: [Hkv, LAST, G, D] in the dtype of q: the last s, that of the token at position p in place p % LAST.
        q: [H, S, D] of new tokens.
        scale: factor of the scores.
        position: of the first of them.
    """
    kv_heads, steps = queries.shape[0], q.shape[1]
    scaled = (q.to(queries.dtype) * scale).contiguous()  # [H, S, D], always new, so that a product takes the same path
    kept = (1 - 1 / RECENT) ** torch.arange(steps, -1, -1, dtype=queries.dtype, device=q.device)  # [S + 1]
    sums = torch.stack([kept[1:] @ scaled, kept[1:] @ scaled.square()], dim=1)  # [H, 2, D]
    queries.mul_(kept[0]).add_(sums.unflatten(0, (kv_heads, -1)).mean(dim=1), alpha=1 / RECENT)
    newest = min(steps, LAST)
    places = torch.arange(position + steps - newest, position + steps, device=q.device) % LAST
    newest_queries = scaled[:, -newest:].unflatten(0, (kv_heads, -1)).transpose(1, 2)  # [Hkv, newest, G, D]
    last.index_copy_(1, places, newest_queries.to(last.dtype))


def worth(keys: Tensor, values: Tensor, degree: Tensor, queries: Tensor, schedule: Schedule) -> Tensor:
    """Say how much each unprotected slot is worth: [R, n - n_sink - n_recent].

    Args:
        keys, values: [R, n, D] float32 or float64.
        degree: [R, n] float32.
        queries: [R, 2, D] in the dtype of the keys.
        schedule: what is protected.
    """
    middle = slice(schedule.n_sink, keys.shape[1] - schedule.n_recent)
    keys, values, weight = keys[:, middle], values[:, middle], degree[:, None, middle].to(keys.dtype)
    tiny = torch.finfo(keys.dtype).tiny

    def unlike(vectors: Tensor, size: Tensor) -> Tensor:
        unit = vectors / size[..., None]
        mean = weight @ unit  # [R, 1, D]
        cosine: Tensor = (unit @ mean.mT / mean.norm(dim=-1, keepdim=True).clamp_min(tiny))[..., 0]
        return -cosine

    key_size, value_size = (vectors.norm(dim=-1).clamp_min(tiny) for vectors in (keys, values))
    distinct = _standard(unlike(keys, key_size)) + VALUE_WEIGHT * _standard(unlike(values, value_size))
    around = F.avg_pool1d(distinct, NEAR, stride=1, padding=NEAR // 2, count_include_pad=False)
    mean, square = queries[:, 0, :, None], queries[:, 1, :, None]  # [R, D, 1]
    expected = keys @ mean + keys.square() @ (square - mean.square()) / 2
    return around + QUERY_WEIGHT * _standard(expected[..., 0] + value_size.log())


def attended(keys: Tensor, degree: Tensor, last: Tensor, schedule: Schedule) -> Tensor:
    """Say how much the last queries attend to each unprotected slot: [R, n - n_sink - n_recent], a logarithm.

    Args:
        keys: [R, n, D] float32 or float64.
        degree: [R, n] float32.
        last: [R, LAST, G, D], any floating dtype.
        schedule: what is protected.
    """
    scores = last.flatten(1, 2).to(keys.dtype) @ keys.mT + degree[:, None].to(keys.dtype).log()  # [R, LAST * G, n]
    attention = scores.softmax(dim=-1).sum(dim=1)
    return attention[:, schedule.n_sink : keys.shape[1] - schedule.n_recent].clamp_min(LEAST_ATTENTION).log()


def _standard(scores: Tensor) -> Tensor:
    centred = scores - scores.mean(dim=-1, keepdim=True)
    return centred / centred.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(LEAST_DEVIATION)


def set_apart(
    keys: Tensor, values: Tensor, degree: Tensor, queries: Tensor, last: Tensor, schedule: Schedule
) -> tuple[Tensor, Tensor, Tensor]:
    """Bring the slots that are worth most to the front of every row, behind the sinks; all others keep their order.

    Args:
        keys, values: [R, n, D], any floating dtype.
        degree: [R, n] float32, all positive.
        queries: [R, 2, D] float32 or float64.
        last: [R, LAST, G, D], any floating dtype.
        schedule: what is protected, and how many slots are exact.
    """
    return _gathered(keys, values, degree, apart_order(keys, values, degree, queries, last, schedule))


def apart_order(
    keys: Tensor, values: Tensor, degree: Tensor, queries: Tensor, last: Tensor, schedule: Schedule
) -> Tensor:
    """The slots [R, n] int64 of every row in the order of `set_apart`, which has the same arguments."""
    exact = _exact(keys, values, degree, queries, last, schedule)
    first = torch.full_like(exact[:, :1], True).expand(-1, schedule.n_sink)
    behind = torch.full_like(exact[:, :1], False).expand(-1, schedule.n_recent)
    front = torch.cat([first, exact, behind], dim=1)  # [R, n]
    return front.sort(dim=1, descending=True, stable=True).indices


def exchange(
    keys: Tensor, values: Tensor, degree: Tensor, queries: Tensor, last: Tensor, schedule: Schedule
) -> tuple[Tensor, Tensor, Tensor]:
    """Let the slots that are worth most take the places of those exact ones that no longer are.

    The i-th slot that enters the front of a row and the i-th that leaves it change places; all others stay.

    Args:
        keys, values: [R, n, D], any floating dtype.
        degree: [R, n] float32, all positive.
        queries: [R, 2, D] float32 or float64.
        last: [R, LAST, G, D], any floating dtype.
        schedule: what is protected, and how many slots are exact.
    """
    exact = _exact(keys, values, degree, queries, last, schedule)
    leaving, entering = ~exact[:, : schedule.n_exact], exact[:, schedule.n_exact :]
    order = torch.arange(keys.shape[1], device=keys.device).repeat(len(keys), 1)
    rows, from_front = leaving.nonzero(as_tuple=True)  # as many in every row as enter, and in the order of slots
    _, from_behind = entering.nonzero(as_tuple=True)
    from_front, from_behind = from_front + schedule.n_sink, from_behind + schedule.n_front
    order[rows, from_front], order[rows, from_behind] = from_behind, from_front
    return _gathered(keys, values, degree, order)


def _exact(keys: Tensor, values: Tensor, degree: Tensor, queries: Tensor, last: Tensor, schedule: Schedule) -> Tensor:
    """The `n_exact` unprotected slots of every row that are chosen [R, n - n_sink - n_recent] bool."""
    wide = accumulator_dtype(keys.dtype)
    keys, count = keys.to(wide), attended_slots(schedule.n_exact)
    scores = worth(keys, values.to(wide), degree, queries, schedule)
    attention = _standard(attended(keys, degree, last, schedule))
    chosen = _best(scores + ATTENTION_WEIGHT * attention, count)
    return chosen | _best(scores.masked_fill(chosen, float("-inf")), schedule.n_exact - count)


def _best(scores: Tensor, count: int) -> Tensor:
    """The `count` highest scores of every row [R, n] bool; of equal ones the lower slots."""
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    scores = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)  # so that `count` are found anyway
    # A selection and not a sort, which takes ten times as long.
    least = scores.topk(count, sorted=False).values.amin(dim=1, keepdim=True)
    above, level = scores > least, scores == least
    return above | (level & (level.cumsum(1) <= count - above.sum(dim=1, keepdim=True)))


def _gathered(keys: Tensor, values: Tensor, degree: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, slots, dim = keys.shape
    whole = (order + slots * torch.arange(rows, device=order.device)[:, None]).flatten()

    def taken(part: Tensor) -> Tensor:
        return part.reshape(-1, dim).index_select(0, whole).view(rows, -1, dim)  # faster than a gather of numbers

    return taken(keys), taken(values), degree.gather(1, order)


def match(keys: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Find for every slot of set A its most similar partner in set B of the same chunk.

    Args:
        keys: [R, n, D] float32 or float64.

    Returns:
        similarity [R, |A|] (cosine, -inf where a chunk has no B) and partner [R, |A|] int64, counted in B.
        Slot `n_front + 2 i` is element i of A, slot `n_front + 2 j + 1` element j of B.
    """
    middle = keys[:, schedule.n_front : max(schedule.n_front, keys.shape[1] - schedule.n_recent)]
    inverse_norm = middle.norm(dim=-1).clamp_min(torch.finfo(keys.dtype).tiny).reciprocal()
    whole = middle.shape[1] // schedule.chunk_size * schedule.chunk_size
    parts = []  # the whole chunks in one batch, then the short one at the end
    for start, stop in ((0, whole), (whole, middle.shape[1])):
        if start == stop:
            continue
        chunks = max(1, (stop - start) // schedule.chunk_size)
        chunked, inverse = (t[:, start:stop].unflatten(1, (chunks, -1)) for t in (middle, inverse_norm))
        # Contiguous, so that the product takes the same path through BLAS however many rows there are.
        set_a, set_b = chunked[:, :, 0::2].contiguous(), chunked[:, :, 1::2].contiguous()
        if set_b.shape[2] == 0:
            similarity = inverse.new_full((keys.shape[0], 1), float("-inf"))
            parts.append((similarity, torch.zeros_like(similarity, dtype=torch.int64)))
            continue
        product = set_a @ set_b.mT * inverse[:, :, None, 1::2]  # [R, chunks, |A|, |B|]
        best, partner = product.max(dim=-1)  # the first maximum: the lower slot
        first = start // 2 + set_b.shape[2] * torch.arange(chunks, device=keys.device)  # of each chunk, counted in B
        parts.append(((best * inverse[:, :, 0::2]).flatten(1), (partner + first[:, None]).flatten(1)))
    if not parts:  # every slot is protected
        return inverse_norm, inverse_norm.to(torch.int64)
    return torch.cat([part[0] for part in parts], dim=1), torch.cat([part[1] for part in parts], dim=1)


def merge(
    keys: Tensor, values: Tensor, degree: Tensor, merges: int, schedule: Schedule
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one clustering round on every row: merge the `merges` most similar matches of each.

    Args:
        keys, values: [R, n, D] float32 or float64, contiguous.
        degree: [R, n] float32, all positive.
        merges: slots that disappear from each row; at most `schedule.mergeable(n)`.

    Returns:
        keys, values [R, n - merges, D] and degree [R, n - merges]. A slot that took part in no merge keeps its bits.
    """
    rows, slots, dim = keys.shape
    similarity, partner = match(keys, schedule)
    ranked = similarity.sort(dim=-1, descending=True, stable=True).indices[:, :merges]  # [R, m] ties: lower slot
    row_start = slots * torch.arange(rows, device=keys.device)[:, None] + schedule.n_front
    gone = (row_start + 2 * ranked).flatten()  # [R * m] slots of A that disappear
    joined = (row_start + 2 * partner.gather(1, ranked) + 1).flatten()  # [R * m] slots of B that take them up

    survives = torch.ones(rows * slots, dtype=torch.bool, device=keys.device).index_fill_(0, gone, False)
    kept = survives.nonzero()[:, 0]  # [R * (n - m)]
    target = (survives.cumsum(0) - 1)[joined]  # where the slots that take up stand among the kept ones
    weight = degree.flatten()
    total = weight.index_add(0, joined, weight[gone])

    def fold(tensor: Tensor) -> Tensor:
        flat = tensor.view(-1, dim)
        out = flat.index_select(0, kept)
        # A slot that takes up several is written several times, each time with the same number.
        out.index_copy_(0, target, flat[joined] * weight[joined, None])
        out.scatter_add_(0, target[:, None].expand(-1, dim), flat[gone] * weight[gone, None])
        out.index_copy_(0, target, out[target] / total[joined, None])
        return out.view(rows, slots - merges, dim)

    return fold(keys), fold(values), total[kept].view(rows, slots - merges)


def compress(
    keys: Tensor, values: Tensor, degree: Tensor, rounds: tuple[int, ...], schedule: Schedule
) -> tuple[Tensor, Tensor, Tensor]:
    """Run clustering rounds that merge `rounds` slots of every row, one after the other.

    Args:
        keys, values: [R, n, D], any floating dtype; they are widened once and rounded once.
        degree: [R, n] float32, all positive.
        rounds: slots to merge in each round.
        schedule: what is protected, and the chunks.
    """
    if not rounds:
        return keys, values, degree
    wide, stop = accumulator_dtype(keys.dtype), keys.shape[1] - schedule.n_recent
    middle = slice(schedule.n_front, stop)  # what may merge: a round would copy the slots around it too
    inner = dataclasses.replace(schedule, n_sink=0, n_exact=0, n_recent=0)
    state = (keys[:, middle].to(wide).contiguous(), values[:, middle].to(wide).contiguous(), degree[:, middle])
    for merges in rounds:
        state = merge(*state, merges, inner)

    def whole(part: Tensor, merged: Tensor) -> Tensor:
        return torch.cat([part[:, : schedule.n_front], merged.to(part.dtype), part[:, stop:]], dim=1)

    return whole(keys, state[0]), whole(values, state[1]), whole(degree, state[2])
