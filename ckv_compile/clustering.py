"""Chunked soft matching over many rows at once: the PyTorch form that the ops run on the CPU.

The same method as in `reference.py`, with every row of a layer in one batch. Rows are independent: a row's result does
not depend on its neighbours.
"""

import torch
from torch import Tensor

from ckv_compile.reference import accumulator_dtype
from ckv_compile.schedule import Schedule


def match(keys: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Find for every slot of set A its most similar partner in set B of the same chunk.

    Args:
        keys: [R, n, D] float32 or float64.

    Returns:
        similarity [R, |A|] (cosine, -inf where a chunk has no B) and partner [R, |A|] int64, counted in B.
        Slot `n_sink + 2 i` is element i of A, slot `n_sink + 2 j + 1` element j of B.
    """
    middle = keys[:, schedule.n_sink : max(schedule.n_sink, keys.shape[1] - schedule.n_recent)]
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
    row_start = slots * torch.arange(rows, device=keys.device)[:, None] + schedule.n_sink
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
    wide = accumulator_dtype(keys.dtype)
    state = (keys.to(wide).contiguous(), values.to(wide).contiguous(), degree)
    for merges in rounds:
        state = merge(*state, merges, schedule)
    return state[0].to(keys.dtype), state[1].to(values.dtype), state[2]
