"""Chunked soft matching over many rows at once: the PyTorch form that the ops run on the CPU.

The same method as `reference.merge_row`, with every row of a layer in one batch. Rows are independent: a row's
result does not depend on its neighbours.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ckv_compile.reference import accumulator_dtype
from ckv_compile.schedule import Schedule


def match(keys: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Find for every slot of set A its most similar partner in set B of the same chunk.

    Args:
        keys: [R, n, D], any floating dtype.

    Returns:
        similarity [R, |A|] (cosine, -inf where a chunk has no B) and partner [R, |A|] int64, counted in B.
        Slot `n_sink + 2 i` is element i of A, slot `n_sink + 2 j + 1` element j of B.
    """
    middle = keys[:, schedule.n_sink : keys.shape[1] - schedule.n_recent].to(accumulator_dtype(keys.dtype))
    unit = middle / middle.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(middle.dtype).tiny)
    set_a, set_b = unit[:, 0::2], unit[:, 1::2]
    half = schedule.chunk_size // 2
    chunks = -(-set_a.shape[1] // half)
    padding = chunks * half - set_b.shape[1]
    chunked_a = F.pad(set_a, (0, 0, 0, chunks * half - set_a.shape[1])).unflatten(1, (chunks, half))
    chunked_b = F.pad(set_b, (0, 0, 0, padding)).unflatten(1, (chunks, half))
    similarity = chunked_a @ chunked_b.mT  # [R, chunks, c/2, c/2]
    if padding:
        similarity[:, -1, :, half - padding :] = float("-inf")
    best, partner = similarity.max(dim=-1)  # the first maximum: the lower slot
    partner = partner + half * torch.arange(chunks, device=keys.device)[:, None]
    count = set_a.shape[1]
    return best.flatten(1)[:, :count], partner.flatten(1)[:, :count]


def merge(
    keys: Tensor, values: Tensor, degree: Tensor, merges: int, schedule: Schedule
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one clustering round on every row: merge the `merges` most similar matches of each.

    Args:
        keys, values: [R, n, D] any floating dtype.
        degree: [R, n] float32, all positive.
        merges: slots that disappear from each row; at most `schedule.mergeable(n)`.

    Returns:
        keys, values [R, n - merges, D] and degree [R, n - merges]. Sums are taken in float32 (float64 for float64);
        a slot that took part in no merge keeps its bits.
    """
    rows, slots, dim = keys.shape
    similarity, partner = match(keys, schedule)
    ranked = similarity.sort(dim=-1, descending=True, stable=True).indices[:, :merges]  # [R, m] ties: lower slot
    gone = schedule.n_sink + 2 * ranked  # [R, m] slots of A that disappear
    joined = schedule.n_sink + 2 * partner.gather(1, ranked) + 1  # [R, m] slots of B that take them up

    # Every total starts from the slot's own degree, so total > degree marks exactly the slots that took something up.
    total = degree.scatter_add(1, joined, degree.gather(1, gone))  # [R, n]
    grown = (total > degree)[..., None]
    survives = torch.ones_like(degree, dtype=torch.bool).scatter_(1, gone, False)
    kept = survives.nonzero()[:, 1].view(rows, slots - merges)

    def mean(tensor: Tensor) -> Tensor:
        wide = tensor.to(accumulator_dtype(tensor.dtype)) * degree[..., None]
        taken = wide.gather(1, gone[..., None].expand(-1, -1, dim))
        centroid = wide.scatter_add(1, joined[..., None].expand(-1, -1, dim), taken) / total[..., None]
        return torch.where(grown, centroid.to(tensor.dtype), tensor).gather(1, kept[..., None].expand(-1, -1, dim))

    return mean(keys), mean(values), total.gather(1, kept)


def compress(keys: Tensor, values: Tensor, degree: Tensor, schedule: Schedule) -> tuple[Tensor, Tensor, Tensor]:
    """Bring rows [R, n, D] within budget by the annealed rounds of the schedule."""
    for merges in schedule.rounds(keys.shape[1]):
        keys, values, degree = merge(keys, values, degree, merges, schedule)
    return keys, values, degree
