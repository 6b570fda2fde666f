"""Chunked soft matching with one thing changed, and the groups of candidates that test the choices of the method.

`csm` is written anew, plainly and with every choice as an argument, so that the product need not carry options that
only an ablation wants; a test compares it with the product. The variants are methods like those of `methods`, and run
on the same prompts and texts.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ckv_compile.evaluation.methods import Layer, Method, Slots
from ckv_compile.schedule import Schedule

Partition = Literal["alternating", "contiguous", "random"]


def csm(
    layer: Layer,
    plans: Sequence[Schedule],
    *,
    partition: Partition = "alternating",
    log_degree: bool = True,
    per_chunk: bool = False,
    before_rope: bool = False,
) -> list[Slots]:
    """Chunked soft matching of a prompt, without exact slots.

    Args:
        layer: what is compressed.
        plans: alike but for their budgets.
        partition: which half of a chunk is set A: every other slot, the first half, or a random half.
        log_degree: count in attention how many tokens a slot stands for; else every slot counts as one token.
        per_chunk: let every chunk merge its share of a round; else the most similar matches of the whole row.
        before_rope: match the keys as they were before they were rotated.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for plan in (dataclasses.replace(plan, n_exact=0) for plan in plans):
        keys, values = layer.k.float(), layer.v.float()
        features = layer.unrotated().float() if before_rope else keys
        degree = torch.ones(keys.shape[:2], device=keys.device)
        for merges in plan.rounds(keys.shape[1]):
            chosen = _chosen(features, merges, plan, partition, per_chunk, generator)
            keys, values, features = (_folded(tensor, degree, *chosen) for tensor in (keys, values, features))
            degree = _folded(degree[..., None], torch.ones_like(degree), *chosen, mean=False)[..., 0]
        degree = degree if log_degree else torch.ones_like(degree)
        found.append(Slots(keys.to(layer.k.dtype), values.to(layer.v.dtype), degree))
    return found


def _chosen(
    keys: Tensor, merges: int, plan: Schedule, partition: Partition, per_chunk: bool, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The slots [Hkv, merges] that a round takes away, and those that they join."""
    heads, slots, _ = keys.shape
    unit = F.normalize(keys, dim=-1)
    cosine = keys.new_full((heads, slots), -math.inf)  # of each slot of A, with its partner
    partner = torch.zeros(heads, slots, dtype=torch.int64, device=keys.device)
    chunks = torch.arange(plan.n_sink, slots - plan.n_recent, device=keys.device).split(plan.chunk_size)
    for chunk in chunks:
        half = (len(chunk) + 1) // 2
        order = torch.randperm(len(chunk), generator=generator).to(keys.device) if partition == "random" else None
        if partition == "alternating":
            set_a, set_b = chunk[0::2], chunk[1::2]
        elif order is None:
            set_a, set_b = chunk[:half], chunk[half:]
        else:
            set_a, set_b = chunk[order[:half]], chunk[order[half:]]
        if len(set_b):
            cosine[:, set_a], best = (unit[:, set_a] @ unit[:, set_b].mT).max(dim=-1)
            partner[:, set_a] = set_b[best]
    if per_chunk:
        cosine = _ranks_in_chunks(cosine, chunks)
    gone = cosine.sort(dim=-1, descending=True, stable=True).indices[:, :merges]
    return gone, partner.gather(1, gone)


def _ranks_in_chunks(cosine: Tensor, chunks: Sequence[Tensor]) -> Tensor:
    """Scores by which the best matches of all chunks come first, then the second best of all, and so on.

    Ranks are shares of the chunk, so that a short one at the end merges no more of its slots than the others.
    """
    scores = torch.full_like(cosine, -math.inf)
    for chunk in chunks:
        own = cosine[:, chunk]
        ranks = own.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1) / len(chunk)
        scores[:, chunk] = torch.where(own > -math.inf, -ranks, -math.inf)
    return scores


def _folded(tensor: Tensor, weight: Tensor, gone: Tensor, joined: Tensor, mean: bool = True) -> Tensor:
    """Add slots [Hkv, m] of a tensor [Hkv, n, D] to those that they join, as weighted means, and leave them out."""
    heads, slots, dim = tensor.shape
    weighted = tensor * weight[..., None]
    rows = gone[..., None].expand(-1, -1, dim)
    sums = weighted.scatter_add(1, joined[..., None].expand(-1, -1, dim), weighted.gather(1, rows))
    if mean:
        sums = sums / weight.scatter_add(1, joined, weight.gather(1, gone))[..., None]
    stays = torch.ones(heads, slots, dtype=torch.bool, device=tensor.device).scatter(1, gone, False)
    return sums[stays].view(heads, slots - gone.shape[1], dim)


VARIANTS: dict[str, Method] = {
    "csm": csm,
    "csm-contiguous": functools.partial(csm, partition="contiguous"),
    "csm-random": functools.partial(csm, partition="random"),
    "csm-no-degree": functools.partial(csm, log_degree=False),
    "csm-per-chunk": functools.partial(csm, per_chunk=True),
    "csm-before-rope": functools.partial(csm, before_rope=True),
}
"""Variants of the method, by name."""

ABLATIONS: dict[str, tuple[str, ...]] = {
    "partition": ("csm", "csm-contiguous", "csm-random"),
    "degree": ("csm", "csm-no-degree"),
    "selection": ("csm", "csm-per-chunk"),
    "rope": ("csm", "csm-before-rope"),
    "exact": tuple(f"ours:exact={share}" for share in (0.0, 0.5, 0.8, 0.9, 0.95)),
    "r-init": tuple(f"ours:exact=0.0,r_init={share},r_min=0.05" for share in (1.0, 0.5, 0.25, 0.1)),
    "rounds": tuple(f"ours:r_init={share}" for share in (0.5, 0.25, 1.0)),
    "r-decay": tuple(f"ours:exact=0.0,r_decay={decay}" for decay in (0.0, 0.01, 0.05)),
    "chunk-size": tuple(f"ours:exact=0.0,chunk_size={size}" for size in (16, 64, 128, 256, 1024)),
    "sinks": tuple(f"ours:n_sink={count}" for count in (0, 4, 16)),
    "recents": tuple(f"ours:n_recent={count}" for count in (0, 8, 32, 64)),
    "interval": tuple(f"ours:interval={steps}" for steps in (1, 16, 64)),
}
"""Candidates whose rows stand beside each other, by the choice that they test. Intervals are for texts alone.

What the paper chooses is tested without exact slots, which would leave centroids little to do. "rounds" is
r_init again, with them.
"""
