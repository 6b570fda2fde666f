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

from ckv_compile.clustering import apart_order, attended
from ckv_compile.evaluation.methods import Layer, Method, Slots, observed, ours, pick
from ckv_compile.ops import compress
from ckv_compile.schedule import Schedule
from ckv_compile.slots import from_int8, to_int8

Partition = Literal["alternating", "contiguous", "random", "distinct"]


def csm(
    layer: Layer,
    plans: Sequence[Schedule],
    *,
    partition: Partition = "alternating",
    log_degree: bool = True,
    per_chunk: bool = False,
    before_rope: bool = False,
    with_values: bool = False,
    keep_norm: bool = False,
    most_degree: float = math.inf,
    exact: bool = False,
) -> list[Slots]:
    """Chunked soft matching of a prompt, without exact slots unless they are asked for.

    Args:
        layer: what is compressed.
        plans: alike but for their budgets.
        partition: which half of a chunk is set A: every other slot, the first half, a random half, or the one whose
            keys are most like the mean direction of all that may merge.
        log_degree: count in attention how many tokens a slot stands for; else every slot counts as one token.
        per_chunk: let every chunk merge its share of a round; else the most similar matches of the whole row.
        before_rope: match the keys as they were before they were rotated.
        with_values: match by the mean of the cosines of keys and of values.
        keep_norm: give merged keys and values the mean length of what they stand for, which averages shorten.
        most_degree: tokens that a merge may bring together, while others are left to merge.
        exact: set the exact slots of the plans apart first, as ours does.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    queries = observed(layer)
    for plan in plans if exact else (dataclasses.replace(plan, n_exact=0) for plan in plans):
        keys, values = layer.k.float(), layer.v.float()
        features = layer.unrotated().float() if before_rope else keys
        if exact and plan.rounds(keys.shape[1]):
            order = apart_order(layer.k, layer.v, torch.ones_like(keys[..., 0]), *queries, plan)
            keys, values, features = (pick(tensor, order) for tensor in (keys, values, features))
        sizes = [tensor.norm(dim=-1, keepdim=True) for tensor in (keys, values)]
        degree = torch.ones(keys.shape[:2], device=keys.device)
        for merges in plan.rounds(keys.shape[1]):
            unit = F.normalize(features, dim=-1)
            if with_values:
                unit = torch.cat([unit, F.normalize(values, dim=-1)], dim=-1)
            cosine, partner = _matches(unit, degree, most_degree, plan, partition, generator)
            chosen = _best(_ranks_in_chunks(cosine, plan) if per_chunk else cosine, partner, merges)
            keys, values, features, *sizes = (
                _folded(tensor, degree, *chosen) for tensor in (keys, values, features, *sizes)
            )
            degree = _folded(degree[..., None], torch.ones_like(degree), *chosen, mean=False)[..., 0]
            if keep_norm:
                keys, values = (
                    torch.where(degree[..., None] > 1, F.normalize(tensor, dim=-1) * size, tensor)
                    for tensor, size in zip((keys, values), sizes, strict=True)
                )
        degree = degree if log_degree else torch.ones_like(degree)
        found.append(Slots(keys.to(layer.k.dtype), values.to(layer.v.dtype), degree))
    return found


def _matches(
    unit: Tensor,
    degree: Tensor,
    most_degree: float,
    plan: Schedule,
    partition: Partition,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """The cosine of every slot of set A to its partner, -inf for all other slots, and the partners: [Hkv, n] each."""
    heads, slots, _ = unit.shape
    cosine = unit.new_full((heads, slots), -math.inf)
    partner = torch.zeros(heads, slots, dtype=torch.int64, device=unit.device)
    for chunk in _chunks(slots, plan, unit.device):
        half = (len(chunk) + 1) // 2
        if partition == "alternating":
            order = torch.cat([torch.arange(0, len(chunk), 2), torch.arange(1, len(chunk), 2)]).expand(heads, -1)
        elif partition == "contiguous":
            order = torch.arange(len(chunk)).expand(heads, -1)
        elif partition == "random":
            order = torch.randperm(len(chunk), generator=generator).expand(heads, -1)
        else:
            middle = slice(plan.n_front, slots - plan.n_recent)
            mean = degree[:, None, middle] @ unit[:, middle]  # [Hkv, 1, D]
            order = (unit[:, chunk] @ mean.mT)[..., 0].argsort(dim=-1, descending=True)
        set_a, set_b = chunk[order].split(half, dim=-1) if len(chunk) > half else (chunk[order], None)  # [Hkv, half]
        if set_b is not None:
            similar = pick(unit, set_a) @ pick(unit, set_b).mT  # [Hkv, |A|, |B|]
            together = degree.gather(1, set_a)[..., None] + degree.gather(1, set_b)[:, None]
            found, best = similar.masked_fill(together > most_degree, -2.0).max(dim=-1)  # below every cosine
            cosine.scatter_(1, set_a, found)
            partner.scatter_(1, set_a, set_b.gather(1, best))
    return cosine, partner


def _chunks(slots: int, plan: Schedule, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.arange(plan.n_front, slots - plan.n_recent, device=device).split(plan.chunk_size))


def _best(scores: Tensor, partner: Tensor, merges: int) -> tuple[Tensor, Tensor]:
    """The slots [Hkv, merges] that a round takes away, and those that they join."""
    gone = scores.sort(dim=-1, descending=True, stable=True).indices[:, :merges]
    return gone, partner.gather(1, gone)


def _ranks_in_chunks(cosine: Tensor, plan: Schedule) -> Tensor:
    """Scores by which the best matches of all chunks come first, then the second best of all, and so on.

    Ranks are shares of the chunk, so that a short one at the end merges no more of its slots than the others.
    """
    scores = torch.full_like(cosine, -math.inf)
    for chunk in _chunks(cosine.shape[1], plan, cosine.device):
        own = cosine[:, chunk]
        ranks = own.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1) / len(chunk)
        scores[:, chunk] = torch.where(own > -math.inf, -ranks, -math.inf)
    return scores


def adaptive(layer: Layer, plans: Sequence[Schedule]) -> list[Slots]:
    """Chunked soft matching without exact slots, whose rounds merge what is alike enough, and not a share of set A.

    That is every match with a cosine of at least the mean one of the first round, of each head for itself; or `r_min`
    of set A, where fewer are.
    """
    generator = torch.Generator()  # which an alternating partition does not ask
    found = []
    for plan in (dataclasses.replace(plan, n_exact=0) for plan in plans):
        plan.rounds(layer.k.shape[1])  # raises where nothing could merge
        heads = []
        for head in range(len(layer.k)):
            keys, values = layer.k[head : head + 1].float(), layer.v[head : head + 1].float()
            degree, enough = torch.ones(keys.shape[:2], device=keys.device), None
            while keys.shape[1] > plan.budget:
                cosine, partner = _matches(F.normalize(keys, dim=-1), degree, math.inf, plan, "alternating", generator)
                if enough is None:
                    enough = cosine[cosine > -math.inf].mean()
                least = max(1, int(plan.r_min * plan.mergeable(keys.shape[1])))
                alike = int((cosine >= enough).sum())
                merges = min(max(least, alike), plan.mergeable(keys.shape[1]), keys.shape[1] - plan.budget)
                chosen = _best(cosine, partner, merges)
                keys, values = (_folded(tensor, degree, *chosen) for tensor in (keys, values))
                degree = _folded(degree[..., None], torch.ones_like(degree), *chosen, mean=False)[..., 0]
            heads.append((keys, values, degree))
        keys, values, degree = (torch.cat(parts) for parts in zip(*heads, strict=True))
        found.append(Slots(keys.to(layer.k.dtype), values.to(layer.v.dtype), degree))
    return found


def by_heads(layer: Layer, plans: Sequence[Schedule]) -> list[Slots]:
    """Ours, with the exact slots of a layer given to its heads by what the last queries attend to.

    Every head has half of its exact slots anyway, and at most three halves; the others go to the heads of the slots
    that are attended to most. A head that has fewer slots than another has empty ones behind them.
    """
    heads, tokens, _ = layer.k.shape
    queries, last = observed(layer)
    whole = torch.ones(layer.k.shape[:2], device=layer.k.device)
    found = []
    for plan in plans:
        if not plan.rounds(tokens):
            found += ours(layer, [plan])
            continue
        attention = attended(layer.k.to(queries.dtype), whole, last, plan)
        own, free = plan.n_exact // 2, heads * (plan.n_exact - plan.n_exact // 2)
        best = attention.sort(dim=-1, descending=True).values[:, own : own + plan.n_exact]  # beyond each head's own
        chosen = best.flatten().topk(min(free, best.numel())).indices // best.shape[1]
        slots = torch.full((heads,), own, device=chosen.device).index_add(0, chosen, torch.ones_like(chosen))
        made = []
        for head, exact in enumerate(slots.tolist()):
            size = dataclasses.replace(plan, n_exact=exact, budget=plan.budget - plan.n_exact + exact)
            one = slice(head, head + 1)
            made.append(compress(layer.k[one], layer.v[one], whole[one], queries[one], last[one], size))
        most = most_slots("ours-by-heads", plan)
        keys, values = (
            torch.cat([F.pad(parts[i], (0, 0, 0, most - parts[i].shape[1])) for parts in made]) for i in range(2)
        )
        degree = torch.cat([F.pad(parts[2], (0, most - parts[2].shape[1])) for parts in made])
        found.append(Slots(keys, values, degree))
    return found


def most_slots(method: str, plan: Schedule) -> int:
    """The most slots of a head that a method makes by a plan."""
    return plan.budget + (plan.n_exact - plan.n_exact // 2) * (method == "ours-by-heads")


def int8(layer: Layer, plans: Sequence[Schedule]) -> list[Slots]:
    """Ours, with what is kept of the prompt rounded to 8 bits, as the product stores it."""

    def rounded(tensor: Tensor) -> Tensor:
        return from_int8(*to_int8(tensor)).to(tensor.dtype)

    return [Slots(rounded(slots.keys), rounded(slots.values), slots.degree) for slots in ours(layer, plans)]


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
    "csm-distinct": functools.partial(csm, partition="distinct"),
    "csm-with-values": functools.partial(csm, with_values=True),
    "csm-keep-norm": functools.partial(csm, keep_norm=True),
    "csm-degree-8": functools.partial(csm, most_degree=8),
    "csm-adaptive": adaptive,
    "ours-contiguous": functools.partial(csm, exact=True, partition="contiguous"),
    "ours-before-rope": functools.partial(csm, exact=True, before_rope=True),
    "ours-by-heads": by_heads,
    "ours-int8": int8,
}
"""Variants of the method, by name."""

ABLATIONS: dict[str, tuple[str, ...]] = {
    "partition": ("csm", "csm-contiguous", "csm-random", "csm-distinct"),
    "degree": ("csm", "csm-no-degree"),
    "selection": ("csm", "csm-per-chunk"),
    "rope": ("csm", "csm-before-rope"),
    "centroid": ("csm", "csm-with-values", "csm-keep-norm", "csm-degree-8"),
    "adaptive": ("csm", "csm-adaptive"),
    "with-exact": ("ours", "ours-contiguous", "ours-before-rope"),
    "heads": ("ours", "ours-by-heads"),
    "int8": ("ours", "ours-int8"),
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

What the paper chooses is tested without exact slots, which would leave centroids little to do. "with-exact" and
"rounds" are some of it again, with them.
"""
