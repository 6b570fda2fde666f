"""The oracle: chunked soft matching (CSM), exact slots and degree-biased attention, row by row, in plain PyTorch.

Written to be read beside the paper (CentroidKV, arXiv 2506.11418), not to be fast. A *row* is the cache of one
(batch row, layer, KV head): keys and values [n, D], degree [n]. Every op, kernel and pass is tested against this
file. All of it also runs in float64.
"""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from ckv_compile.schedule import GroupPlan, Plans, Schedule

LARGEST = 127
"""Steps of the largest number of a vector that is rounded to 8 bits."""
RECENT = 256
"""Tokens over which the means of the queries run."""
NEAR = 9
"""Slots whose unlikeness is averaged: one and its neighbours."""
VALUE_WEIGHT = 0.5
"""Weight of the unlikeness of a value, beside that of the key."""
QUERY_WEIGHT = 0.5
"""Weight of expected attention, beside unlikeness."""
LEAST_DEVIATION = 1e-6
"""Deviation below which scores count as alike."""
LAST = 8
"""Last tokens of a row whose queries are kept one by one."""
ATTENTION_WEIGHT = 1.0
"""Weight of what the last queries attend to, beside what a slot is worth."""
ATTENDED_SHARE = 0.6
"""Share of the exact slots that are chosen with that weight; the others are chosen without."""
LEAST_ATTENTION = torch.finfo(torch.float32).tiny
"""Attention below which slots count as not attended to."""


class Row(NamedTuple):
    """One row of a clustered cache: keys [n, D], values [n, D], degree [n] (tokens each slot stands for)."""

    keys: Tensor
    values: Tensor
    degree: Tensor


class Queries(NamedTuple):
    """What is known of the recent queries q of a KV head, each scaled: s = scale * q.

    The last ones stand at place p % LAST of the position p of their token. Where no token has been stand zeros, which
    attend to all slots alike.
    """

    mean: Tensor  # [D] running mean of s
    square: Tensor  # [D] and of its square
    last: Tensor  # [LAST, G, D] in the dtype of q

    @classmethod
    def none(cls, q: Tensor) -> "Queries":
        """What is known before the first token, for queries q [G, S, D]."""
        zeros = q.new_zeros(q.shape[2], dtype=accumulator_dtype(q.dtype))
        return cls(zeros, zeros, q.new_zeros(LAST, q.shape[0], q.shape[2]))


class Match(NamedTuple):
    """A candidate merge: slot `a` (set A) into slot `b` (set B of the same chunk), cosine `similarity`."""

    similarity: float
    a: int
    b: int


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64; everything else computes in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def observe(queries: Queries, q: Tensor, scale: float, position: int) -> Queries:
    """Take in the queries of new tokens.

    In the running means the share of a token falls by 1 / RECENT a token; the last LAST tokens are kept as they are.

    Args:
        queries: of the tokens before.
        q: [G, S, D] of the G query heads of a KV head, S new tokens.
        scale: factor of the scores.
        position: of the first of them.
    """
    mean, square, last = queries.mean, queries.square, queries.last.clone()
    for offset, token in enumerate(q.unbind(dim=1)):  # [G, D]
        scaled = token.to(mean.dtype) * scale
        mean = mean + (scaled.mean(dim=0) - mean) / RECENT
        square = square + (scaled.square().mean(dim=0) - square) / RECENT
        last[(position + offset) % LAST] = scaled.to(last.dtype)
    return Queries(mean, square, last)


def unlike(vectors: Tensor, degree: Tensor) -> Tensor:
    """Minus the cosine of each vector [n, D] to the mean of their directions, weighed by degree [n]."""
    tiny = torch.finfo(vectors.dtype).tiny
    unit = vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(tiny)
    mean = (degree.to(unit.dtype)[:, None] * unit).sum(dim=0)
    cosine: Tensor = unit @ mean / mean.norm().clamp_min(tiny)
    return -cosine


def standard(scores: Tensor) -> Tensor:
    """Scores [n] with mean 0 and deviation 1; scores that are all alike stay near 0."""
    centred = scores - scores.mean()
    return centred / centred.square().mean().sqrt().clamp_min(LEAST_DEVIATION)


def worth_row(row: Row, queries: Queries, schedule: Schedule) -> Tensor:
    """Say how much each unprotected slot of a row in float32 or float64 is worth: [n - n_sink - n_recent].

    Two scores are added, each with mean 0 and deviation 1 over these slots (the sum, its weights and the average over
    neighbours are ours).

    *Unlike*: minus the cosine of a key to the mean direction of all keys (KeyDiff, Park et al., arXiv 2504.15364), and
    half of the same for values, averaged over the NEAR slots around: what is worth keeping is seldom one token.

    *Expected*: the logarithm of what a Gaussian query makes of a slot, log |v| + m.k + k.(Var k) / 2 (Expected
    Attention, Devoto et al., arXiv 2510.00636; here of the recent queries of all heads together, each coordinate by
    itself).
    """
    keys, values, degree = (part[schedule.n_sink : part.shape[0] - schedule.n_recent] for part in row)
    distinct = standard(unlike(keys, degree)) + VALUE_WEIGHT * standard(unlike(values, degree))
    around = [distinct[max(0, i - NEAR // 2) : i + NEAR // 2 + 1].mean() for i in range(len(distinct))]
    variance = queries.square - queries.mean.square()
    expected = keys @ queries.mean + keys.square() @ variance / 2
    size = values.norm(dim=-1).clamp_min(torch.finfo(values.dtype).tiny).log()
    return torch.stack(around) + QUERY_WEIGHT * standard(expected + size)


def attended_row(row: Row, queries: Queries, schedule: Schedule) -> Tensor:
    """Say how much the last queries attend to each unprotected slot of a row in float32 or float64, as a logarithm.

    Each of the G * LAST queries attends to all slots of the row, those after its own token too. What the heads of a
    model add to that, a cap or a sink, is left out.

    Returns:
        [n - n_sink - n_recent]: the logarithm of the attention of all queries together.
    """
    scores = queries.last.flatten(0, 1).to(row.keys.dtype) @ row.keys.T + row.degree.to(row.keys.dtype).log()
    attention = scores.softmax(dim=-1).sum(dim=0)
    return attention[schedule.n_sink : len(attention) - schedule.n_recent].clamp_min(LEAST_ATTENTION).log()


def attended_slots(n_exact: int) -> int:
    """How many of the exact slots are chosen with the attention of the last queries."""
    return int(ATTENDED_SHARE * n_exact)


def exact_slots(row: Row, queries: Queries, schedule: Schedule) -> list[int]:
    """Choose `n_exact` unprotected slots, which are returned in order; of equal ones the first.

    A share of them is chosen by what they are worth and what the last queries attend to, and then, of all others, the
    rest by what they are worth alone: what is looked at now is kept, and what stands out too (ours).
    """
    row = widened(row)
    worth = worth_row(row, queries, schedule)
    attended = worth + ATTENTION_WEIGHT * standard(attended_row(row, queries, schedule))
    chosen = best(attended.tolist(), [], attended_slots(schedule.n_exact))
    chosen = best(worth.tolist(), chosen, schedule.n_exact)
    return sorted(schedule.n_sink + slot for slot in chosen)


def best(scores: list[float], chosen: list[int], count: int) -> list[int]:
    """`count` slots: those that are chosen already, then the others by their scores; of equal ones the first."""
    left = [slot for slot in range(len(scores)) if slot not in chosen]
    return [*chosen, *sorted(left, key=lambda slot: (-scores[slot], slot))][:count]


def set_apart(row: Row, queries: Queries, schedule: Schedule) -> Row:
    """Bring the slots that are worth most to the front, behind the sinks; all others keep their order."""
    exact = exact_slots(row, queries, schedule)
    rest = [slot for slot in range(schedule.n_sink, row.keys.shape[0]) if slot not in exact]
    order = [*range(schedule.n_sink), *exact, *rest]
    return Row(*(part[order] for part in row))


def exchange(row: Row, queries: Queries, schedule: Schedule) -> Row:
    """Let the slots that are worth most take the places of those exact ones that no longer are.

    The i-th slot that enters the front and the i-th that leaves it change places; all others stay where they are.
    """
    exact = exact_slots(row, queries, schedule)
    entering = [slot for slot in exact if slot >= schedule.n_front]
    leaving = [slot for slot in range(schedule.n_sink, schedule.n_front) if slot not in exact]
    order = list(range(row.keys.shape[0]))
    for a, b in zip(entering, leaving, strict=True):
        order[a], order[b] = b, a
    return Row(*(part[order] for part in row))


def match_row(keys: Tensor, schedule: Schedule) -> list[Match]:
    """Find the best partner in B of every slot in A, chunk by chunk (paper, section "Chunked Soft Matching").

    The unprotected slots are cut into chunks in sequence order; even offsets of a chunk are A, odd ones B.
    Similarity is the cosine of the keys as cached (post-RoPE, one KV head: our choice), with 0 for a key of
    norm 0. Ties go to the lower slot.

    Args:
        keys: [n, D] float32 or float64.

    Returns:
        The matches in slot order of `a`.
    """
    unit = keys / keys.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(keys.dtype).tiny)
    matches: list[Match] = []
    end = keys.shape[0] - schedule.n_recent
    for start in range(schedule.n_front, end, schedule.chunk_size):
        stop = min(start + schedule.chunk_size, end)
        set_a, set_b = range(start, stop, 2), range(start + 1, stop, 2)
        if not set_b:
            continue
        similarity = unit[list(set_a)] @ unit[list(set_b)].T  # [|A|, |B|]
        best, partner = similarity.max(dim=1)  # the first maximum: the lower slot
        matches += [
            Match(score, a, set_b[j]) for score, a, j in zip(best.tolist(), set_a, partner.tolist(), strict=True)
        ]
    return matches


def merge_row(row: Row, merges: int, schedule: Schedule) -> Row:
    """Run one clustering round: merge the `merges` most similar matches of the row into their partners.

    n' = n_b + sum n_a;  K' = (n_b K_b + sum n_a K_a) / n';  the same for V. Several slots of A may join one B;
    the sums are taken at once. Survivors keep their order; slots without a merge keep their bits.

    Returns:
        A row of n - merges slots.
    """
    ranked = sorted(match_row(row.keys, schedule), key=lambda match: (-match.similarity, match.a))[:merges]
    if len(ranked) < merges:
        raise ValueError(f"{merges} merges asked for, but a row of {row.keys.shape[0]} slots offers {len(ranked)}")
    clusters: dict[int, list[int]] = {}
    for match in ranked:
        clusters.setdefault(match.b, [match.b]).append(match.a)
    keys, values, degree = row.keys.clone(), row.values.clone(), row.degree.clone()
    for b, members in clusters.items():
        weight = row.degree[members]
        keys[b] = (weight[:, None] * row.keys[members]).sum(0) / weight.sum()
        values[b] = (weight[:, None] * row.values[members]).sum(0) / weight.sum()
        degree[b] = weight.sum()
    gone = {match.a for match in ranked}
    kept = [slot for slot in range(row.keys.shape[0]) if slot not in gone]
    return Row(keys[kept], values[kept], degree[kept])


def compress_row(row: Row, rounds: tuple[int, ...], schedule: Schedule) -> Row:
    """Run clustering rounds on a row, in float32 or better; K and V are rounded to their dtype once, at the end."""
    dtype = row.keys.dtype
    row = widened(row)
    for merges in rounds:
        row = merge_row(row, merges, schedule)
    return Row(row.keys.to(dtype), row.values.to(dtype), row.degree)


def widened(row: Row) -> Row:
    """The same row with keys and values in float32 or better."""
    wide = accumulator_dtype(row.keys.dtype)
    return Row(row.keys.to(wide), row.values.to(wide), row.degree)


def rounded(row: Row) -> Row:
    """The same row with every key and value rounded to multiples of a step of its own, of which 127 at most.

    The step is a 127th of the largest number of the vector, rounded up to 16 significant bits.
    """

    def vectors(given: Tensor) -> Tensor:
        largest = given.float().abs().amax(dim=-1, keepdim=True)
        mantissa, exponent = torch.frexp((largest / LARGEST).clamp_min(torch.finfo(torch.float32).tiny))
        step = torch.ldexp((mantissa * 2**16).ceil() / 2**16, exponent)
        return (step * (given.float() / step).round()).to(given.dtype)

    return Row(vectors(row.keys), vectors(row.values), row.degree)


def attend_row(
    q: Tensor,
    row: Row,
    scale: float,
    causal_tail: int = 0,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Degree-biased attention: softmax(q.k * scale + log n) V. Exact when the merged keys were equal.

    Args:
        q: [S, D] queries of one head.
        row: n slots; a slot of degree 0 is empty and gets no weight.
        scale: factor of the scores.
        causal_tail: the last `causal_tail` slots are the tokens of the queries themselves: query i sees the
            first i + 1 of them.
        softcap: scores become softcap * tanh(score / softcap) before the degree enters; 0 leaves them.
        sink: [] a learned logit that takes part in the softmax and has no value.
        window: the slots are single tokens and the queries the last ones: a query sees itself and the window - 1
            slots before it; 0 sees all.

    Returns:
        [S, D] in the dtype of q.
    """
    wide = accumulator_dtype(q.dtype)
    scores = q.to(wide) @ row.keys.to(wide).T * scale  # [S, n]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + row.degree.to(wide).log()
    if causal_tail:
        future = torch.ones(q.shape[0], causal_tail, dtype=torch.bool, device=q.device).triu(1)
        scores[:, -causal_tail:] = scores[:, -causal_tail:].masked_fill(future, float("-inf"))
    if window:
        past = torch.ones_like(scores, dtype=torch.bool).tril(scores.shape[1] - scores.shape[0] - window)
        scores = scores.masked_fill(past, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.to(wide).expand(q.shape[0], 1)], dim=1)
    weights = scores.softmax(dim=-1)[:, : row.keys.shape[0]]
    return (weights @ row.values.to(wide)).to(q.dtype)


class CacheRows:
    """A whole reference cache: `Row`s by (batch row, layer, KV head), driven like the ops.

    `attend` is `ckv::cached_attention`, or `ckv::window_attention` for a layer with a window, and `finish_step` is
    `ckv::compact_`. A row that has no free slot left at the end of a step is brought to the budget: by annealed rounds
    after several tokens, by one round after one; before that, its exact slots are chosen. `windows` holds the last
    tokens of the layers with a window, `queries` what is known of those of the other layers.

    Args:
        schedule: how a row is compacted.
        capacity: slots of a row.
        light: both, of a row of a light layer.
        light_layers: which layers those are, of the ones without a window.
        int8: round what the rows hold to 8 bits (see `rounded`): a single new token before it is attended to, several
            at the end of their step.
    """

    def __init__(
        self,
        schedule: Schedule,
        capacity: int,
        light: GroupPlan | None = None,
        light_layers: Collection[int] = (),
        int8: bool = False,
    ) -> None:
        main = GroupPlan(schedule, capacity)
        self.light_layers, self.int8 = light_layers, int8
        self.plans = Plans(main, light or main)
        self.rows: dict[tuple[int, int, int], Row] = {}
        self.windows: dict[tuple[int, int, int], Row] = {}
        self.queries: dict[tuple[int, int, int], Queries] = {}
        self.position: dict[int, int] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        window: int = 0,
    ) -> Tensor:
        """Append k, v [B, Hkv, S, D] to `layer` and return the attention of q [B, H, S, D] over it.

        Layers with and without a window are counted apart. `sinks` [H] has one logit a query head.
        """
        batch, heads, steps, _ = q.shape
        kv_heads = k.shape[1]
        out = torch.empty_like(q)
        rows = self.windows if window else self.rows
        for b in range(batch):
            for h in range(kv_heads):
                new = Row(k[b, h], v[b, h], torch.ones(steps, dtype=torch.float32, device=k.device))
                if self.int8 and steps == 1 and not window:
                    new = rounded(new)
                old = rows.get((b, layer, h))
                row = new if old is None else Row(*(torch.cat(pair) for pair in zip(old, new, strict=True)))
                own = range(h * heads // kv_heads, (h + 1) * heads // kv_heads)
                if not window:
                    known = self.queries.get((b, layer, h), Queries.none(q[b, own]))
                    self.queries[b, layer, h] = observe(known, q[b, own], scale, self.position.get(b, 0))
                for g in own:
                    sink = None if sinks is None else sinks[g]
                    out[b, g] = attend_row(q[b, g], row, scale, steps, softcap, sink, window)
                rows[b, layer, h] = Row(*(part[-window:] for part in row))  # -0: all
        return out

    def finish_step(self, tokens: int) -> None:
        """Advance the positions by `tokens` and compact the rows that are full."""
        for key, row in self.rows.items():
            schedule, capacity = self.plans.light if key[1] in self.light_layers else self.plans.main
            slots = row.keys.shape[0]
            if slots >= capacity:
                if schedule.n_exact:
                    choose = exchange if tokens == 1 else set_apart
                    row = choose(row, self.queries[key], schedule)
                rounds = (slots - schedule.budget,) if tokens == 1 else schedule.rounds(slots)
                row = compress_row(row, rounds, schedule)
            self.rows[key] = rounded(row) if self.int8 else row
        for b in {b for b, _, _ in (*self.rows, *self.windows)}:
            self.position[b] = self.position.get(b, 0) + tokens
