"""Ways to compress what a layer holds of a prompt: the product's own, and the methods that it is compared with.

A method takes the exact queries, keys and values of one layer, as its attention saw them, and returns the slots that
stay for every KV head, for each of several budgets. **A budget is what is kept**, not what is removed: 0.25 keeps a
quarter of the tokens. All methods keep the first `n_sink` and the last `n_recent` tokens as they are, whether their
papers do or not, and choose in between.

Scores of query heads are averaged over those that share a KV head. All of this is float32.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ckv_compile.clustering import observe_
from ckv_compile.errors import UnsupportedModelError
from ckv_compile.ops import compress
from ckv_compile.reference import LAST, accumulator_dtype
from ckv_compile.schedule import Schedule

_BLOCK = 256  # queries whose attention is held at once
_OBSERVED = 32  # last queries that SnapKV looks at
_POOL = 7  # neighbours that share SnapKV's largest score
KMEANS_ITERATIONS = 5


class Layer(NamedTuple):
    """The attention of one layer over a prompt of n tokens, of one row."""

    q: Tensor  # [H, n, D]
    k: Tensor  # [Hkv, n, D]
    v: Tensor  # [Hkv, n, D]
    scale: float
    softcap: float
    sinks: Tensor | None  # [H]
    rope: tuple[Tensor, Tensor] | None = None  # cosines and sines [n, R], if the first R numbers of a key are rotated

    def until(self, length: int) -> "Layer":
        """The same layer after its first `length` tokens."""
        rope = None if self.rope is None else (self.rope[0][:length], self.rope[1][:length])
        return self._replace(q=self.q[:, :length], k=self.k[:, :length], v=self.v[:, :length], rope=rope)

    def unrotated(self) -> Tensor:
        """The keys [Hkv, n, D] float32 before they were rotated.

        Raises:
            UnsupportedModelError: if it is not known how.
        """
        if self.rope is None:
            raise UnsupportedModelError(
                "keys before RoPE need a model with one rotary embedding for all layers, a module named rotary_emb"
            )
        cos, sin = (table.float() for table in self.rope)
        k = self.k.float()
        rotated, rest = k[..., : cos.shape[-1]], k[..., cos.shape[-1] :]
        turned = torch.cat([-rotated.chunk(2, dim=-1)[1], rotated.chunk(2, dim=-1)[0]], dim=-1)
        return torch.cat([(rotated * cos - turned * sin) / (cos**2 + sin**2), rest], dim=-1)


class Slots(NamedTuple):
    """What stays of one layer."""

    keys: Tensor  # [Hkv, m, D]
    values: Tensor  # [Hkv, m, D]
    degree: Tensor  # [Hkv, m] float32; tokens that a slot stands for


Method = Callable[[Layer, Sequence[Schedule]], list[Slots]]
"""What stays of a layer under each of several plans, which are alike but for their budgets."""


def full(layer: Layer, plans: Sequence[Schedule]) -> list[Slots]:
    """Everything: the full cache."""
    return [_whole(layer)] * len(plans)


def ours(layer: Layer, plans: Sequence[Schedule]) -> list[Slots]:
    """Exact slots and centroids: what the ops of the product make of the same prompt, bit for bit."""
    return [Slots(*compress(*_whole(layer), *observed(layer), plan)) for plan in plans]


def observed(layer: Layer) -> tuple[Tensor, Tensor]:
    """What the product knows of the queries of a prompt: `queries` and `last` of `clustering.observe_`."""
    kv_heads, _, dim = layer.k.shape
    queries = layer.q.new_zeros(kv_heads, 2, dim, dtype=accumulator_dtype(layer.q.dtype))
    last = layer.q.new_zeros(kv_heads, LAST, len(layer.q) // kv_heads, dim)
    observe_(queries, last, layer.q, layer.scale, position=0)
    return queries, last


def streaming(layer: Layer, plans: Sequence[Schedule]) -> list[Slots]:
    """Sinks and recent tokens alone: StreamingLLM (Xiao et al., 2023, arXiv 2309.17453)."""
    kv_heads, tokens, _ = layer.k.shape
    return _evicted(layer, plans, torch.arange(tokens, device=layer.k.device).float().expand(kv_heads, -1))


def h2o(layer: Layer, plans: Sequence[Schedule]) -> list[Slots]:
    """Tokens that all queries together attended to most: heavy hitters (H2O, Zhang et al., 2023, arXiv 2306.14048).

    The scores are those of the whole prompt, and tokens are evicted once, behind it; H2O itself evicts at every token.
    """
    return _evicted(layer, plans, _attended(layer))


def d2o(layer: Layer, plans: Sequence[Schedule]) -> list[Slots]:
    """H2O, whose evicted tokens are merged into those that stay (D2O, Wan et al., 2024, arXiv 2406.13035).

    An evicted token joins the one that stays with the most similar key, if their cosine u is at least the mean of those
    of all evicted tokens; of what joins, keys and values are averaged with the weights exp(u), and exp(1) for the token
    that stays. A slot has degree 1 as before. The paper also gives layers budgets of their own, which this does not.
    """
    ranked = _ranked(layer, plans[0], _attended(layer))
    unit = F.normalize(layer.k.float(), dim=-1)
    found = []
    for plan in plans:
        kept, evicted = ranked[:, : plan.budget].sort(dim=-1).values, ranked[:, plan.budget :]
        slots = _taken(layer, kept)
        if evicted.shape[1]:
            cosines = pick(unit, evicted) @ pick(unit, kept).mT
            cosine, joined = cosines.max(dim=-1)  # [Hkv, evicted]
            weight = cosine.exp() * (cosine >= cosine.mean(dim=-1, keepdim=True))
            total = torch.full(kept.shape, math.e, device=kept.device).scatter_add_(1, joined, weight)
            keys, values = (
                (math.e * stays.float()).scatter_add_(
                    1, joined[..., None].expand(-1, -1, stays.shape[-1]), weight[..., None] * pick(goes, evicted)
                )
                / total[..., None]
                for stays, goes in zip(slots[:2], (layer.k, layer.v), strict=True)
            )
            slots = Slots(keys.to(layer.k.dtype), values.to(layer.v.dtype), slots.degree)
        found.append(slots)
    return found


def snapkv(layer: Layer, plans: Sequence[Schedule]) -> list[Slots]:
    """Tokens that the last 32 queries attend to, with their neighbours (SnapKV, Li et al., 2024, arXiv 2404.14469).

    A token has the largest score of the 7 tokens around it.
    """
    tokens = layer.q.shape[1]
    scores = _attention(layer, max(0, tokens - _OBSERVED), tokens).sum(dim=1)
    return _evicted(layer, plans, F.max_pool1d(scores, _POOL, stride=1, padding=_POOL // 2))


def tova(layer: Layer, plans: Sequence[Schedule]) -> list[Slots]:
    """Tokens that the last query attends to (TOVA, Oren et al., 2024, arXiv 2401.06104).

    Each KV head chooses its own here, and once; in TOVA all heads of a layer keep the same tokens, chosen at every one.
    """
    tokens = layer.q.shape[1]
    return _evicted(layer, plans, _attention(layer, tokens - 1, tokens)[:, 0])


def key_norm(layer: Layer, plans: Sequence[Schedule]) -> list[Slots]:
    """Tokens with the shortest keys, which attract attention (Devoto et al., 2024, arXiv 2406.11430)."""
    return _evicted(layer, plans, -layer.k.float().norm(dim=-1))


def keydiff(layer: Layer, plans: Sequence[Schedule]) -> list[Slots]:
    """Tokens whose keys are least like the others' (KeyDiff, Park et al., 2025, arXiv 2504.15364).

    That is a low cosine to the mean of all keys of the head, each scaled to length one.
    """
    unit = F.normalize(layer.k.float(), dim=-1)
    return _evicted(layer, plans, -F.cosine_similarity(unit, unit.mean(dim=1, keepdim=True), dim=-1))


def expected_attention(layer: Layer, plans: Sequence[Schedule]) -> list[Slots]:
    """Tokens that a Gaussian query would attend to (Expected Attention, Devoto et al., 2025, arXiv 2510.00636).

    With the mean m and covariance C of the queries of a head, E[exp(s q.k)] = exp(s m.k + s^2 k'Ck / 2). Divided by
    its sum over the tokens, and times the length of the value, that is the score. Mean and covariance are those of the
    prompt's queries behind the sinks, after RoPE; the paper takes them before, and averages RoPE over coming positions.
    """
    heads, tokens, _ = layer.q.shape
    kv_heads = layer.k.shape[0]
    queries = layer.q[:, min(plans[0].n_sink, tokens - 1) :].float()
    mean = queries.mean(dim=1, keepdim=True)  # [H, 1, D]
    centred = queries - mean
    covariance = centred.mT @ centred / queries.shape[1]  # [H, D, D]
    k = layer.k.float().repeat_interleave(heads // kv_heads, dim=0)  # [H, n, D]
    exponent = layer.scale * (k @ mean.mT)[:, :, 0] + layer.scale**2 / 2 * ((k @ covariance) * k).sum(dim=-1)
    expected = exponent.softmax(dim=-1).view(kv_heads, -1, tokens).mean(dim=1)
    return _evicted(layer, plans, expected * layer.v.float().norm(dim=-1))


def kmeans(layer: Layer, plans: Sequence[Schedule]) -> list[Slots]:
    """Clusters of keys by K-means (Lloyd, 1982), anywhere in the prompt; their mean keys, mean values and sizes.

    It begins with tokens at equal distances and runs 5 iterations. A cluster that loses all its tokens is an empty
    slot, of degree 0.
    """
    return [_kmeans(layer, plan) for plan in plans]


def _kmeans(layer: Layer, plan: Schedule) -> Slots:
    tokens, whole = layer.k.shape[1], _whole(layer)
    first, last = _middle(tokens, plan)
    clusters = plan.budget - (tokens - (last - first))
    if clusters >= last - first:
        return whole
    keys, values = layer.k[:, first:last].float(), layer.v[:, first:last].float()
    spread = torch.linspace(0, last - first - 1, clusters, device=keys.device).round().long()
    centres, ones = keys[:, spread], torch.ones_like(keys[..., 0])
    for _ in range(KMEANS_ITERATIONS):
        nearest = torch.cdist(keys, centres).argmin(dim=-1)  # [Hkv, last - first]
        sizes = torch.zeros_like(centres[..., 0]).scatter_add_(1, nearest, ones)
        centres = torch.where(sizes[..., None] > 0, _means(keys, nearest, sizes), centres)
    merged = Slots(centres.to(layer.k.dtype), _means(values, nearest, sizes).to(layer.v.dtype), sizes)
    return Slots(
        *(
            torch.cat([exact[:, :first], middle, exact[:, last:]], dim=1)
            for exact, middle in zip(whole, merged, strict=True)
        )
    )


def _means(tokens: Tensor, cluster: Tensor, sizes: Tensor) -> Tensor:
    """Means of tokens [Hkv, n, D] by their cluster [Hkv, n]; zero where there are none."""
    sums = tokens.new_zeros(*sizes.shape, tokens.shape[-1])
    sums.scatter_add_(1, cluster[..., None].expand_as(tokens), tokens)
    return sums / sizes.clamp_min(1.0)[..., None]


def _whole(layer: Layer) -> Slots:
    return Slots(layer.k, layer.v, torch.ones(layer.k.shape[:2], device=layer.k.device))


def _middle(tokens: int, plan: Schedule) -> tuple[int, int]:
    """Where the tokens begin and end that a method chooses from."""
    first = min(plan.n_sink, tokens)
    return first, max(first, tokens - plan.n_recent)


def _ranked(layer: Layer, plan: Schedule, scores: Tensor) -> Tensor:
    """Tokens [Hkv, n] by their scores [Hkv, n], the protected ones before all others, of equal ones the first."""
    first, last = _middle(layer.k.shape[1], plan)
    scores = scores.clone()
    scores[:, :first] = scores[:, last:] = math.inf
    return scores.sort(dim=-1, descending=True, stable=True).indices


def _evicted(layer: Layer, plans: Sequence[Schedule], scores: Tensor) -> list[Slots]:
    """Keep the tokens with the highest scores [Hkv, n], in sequence order."""
    ranked = _ranked(layer, plans[0], scores)
    return [_taken(layer, ranked[:, : plan.budget].sort(dim=-1).values) for plan in plans]


def _taken(layer: Layer, tokens: Tensor) -> Slots:
    """The tokens [Hkv, m] of each head."""
    return Slots(pick(layer.k, tokens), pick(layer.v, tokens), torch.ones(tokens.shape, device=tokens.device))


def pick(tensor: Tensor, tokens: Tensor) -> Tensor:
    """The rows of the tokens [Hkv, m] in a tensor [Hkv, n, D]."""
    return tensor.gather(1, tokens[..., None].expand(-1, -1, tensor.shape[-1]))


def _attended(layer: Layer) -> Tensor:
    """What all queries together attend to [Hkv, n]."""
    scores = torch.zeros(layer.k.shape[:2], device=layer.k.device)
    for start in range(0, layer.q.shape[1], _BLOCK):
        scores += _attention(layer, start, start + _BLOCK).sum(dim=1)
    return scores


def _attention(layer: Layer, start: int, stop: int) -> Tensor:
    """What queries start..stop attend to [Hkv, queries, n]: causal, with the caps and sinks of the model."""
    kv_heads, tokens, _ = layer.k.shape
    q = layer.q[:, start:stop].float()
    heads, queries, _ = q.shape
    logits = layer.scale * (q.reshape(kv_heads, -1, q.shape[-1]) @ layer.k.float().mT).view(heads, queries, tokens)
    if layer.softcap:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    later = torch.ones(queries, tokens, dtype=torch.bool, device=q.device).triu(start + 1)
    logits = logits.masked_fill(later, -math.inf)
    if layer.sinks is not None:
        logits = torch.cat([logits, layer.sinks.float()[:, None, None].expand(-1, queries, 1)], dim=-1)
    return logits.softmax(dim=-1)[..., :tokens].view(kv_heads, -1, queries, tokens).mean(dim=1)


OURS = "ours"
FULL = "full"

METHODS: dict[str, Method] = {
    FULL: full,
    OURS: ours,
    "streaming": streaming,
    "h2o": h2o,
    "d2o": d2o,
    "snapkv": snapkv,
    "tova": tova,
    "key-norm": key_norm,
    "keydiff": keydiff,
    "expected-attention": expected_attention,
    "kmeans": kmeans,
}
"""The methods, by name."""
