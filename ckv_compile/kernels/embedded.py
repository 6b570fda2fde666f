"""The operators of one decode step as `triton_op`s: what Inductor compiles into a CUDA package.

They have the schemas of `ops.py`, without the padding that a step of one token cannot have, and run its launchers.
"""

import torch
from torch import Tensor

from ckv_compile.kernels import attention, compaction
from ckv_compile.kernels.builds import in_graph
from ckv_compile.schedule import Schedule


@torch.library.triton_op(
    "ckv_triton::cached_attention", mutates_args={"keys", "values", "degree", "queries", "last_queries"}
)
def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    degree: Tensor,
    queries: Tensor,
    last_queries: Tensor,
    fill: Tensor,
    active: Tensor,
    position: Tensor,
    layer: int,
    scale: float,
    sinks: Tensor | None,
    softcap: float,
    budget: int,
    n_sink: int,
    n_recent: int,
    chunk_size: int,
    r_init: float,
    r_decay: float,
    r_min: float,
    n_exact: int = 0,
) -> Tensor:
    """`ckv::cached_attention` of one token a row."""
    state = (keys, values, degree, queries, last_queries, fill, active, position)
    with in_graph():
        return attention.decode_attention(q, k, v, *state, layer, scale, softcap, sinks)


@torch.library.triton_op("ckv_triton::window_attention", mutates_args={"keys", "values"})
def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    active: Tensor,
    layer: int,
    scale: float,
    sinks: Tensor | None,
    softcap: float,
) -> Tensor:
    """`ckv::window_attention` of one token a row."""
    state = (keys, values, None, None, None, position, active, None)
    with in_graph():
        return attention.decode_attention(q, k, v, *state, layer, scale, softcap, sinks)


@torch.library.triton_op("ckv_triton::compact_", mutates_args={"keys", "values", "degree", "fill", "position"})
def compact_(
    keys: Tensor,
    values: Tensor,
    degree: Tensor,
    queries: Tensor,
    last_queries: Tensor,
    fill: Tensor,
    active: Tensor,
    position: Tensor | None,
    tokens: int,
    budget: int,
    n_sink: int,
    n_recent: int,
    chunk_size: int,
    r_init: float,
    r_decay: float,
    r_min: float,
    n_exact: int = 0,
) -> None:
    """`ckv::compact_` after one token a row."""
    if not keys.shape[1]:  # windows alone, which are never compacted
        fill.add_(active)
        if position is not None:
            position.add_(active)
        return
    schedule = Schedule(budget, n_sink, n_recent, chunk_size, r_init, r_decay, r_min, n_exact)
    seen = torch.empty_like(fill) if position is None else position  # see `ops._compact`
    with in_graph():
        compaction.compact(keys, values, degree, queries, last_queries, fill, seen, active, schedule)
