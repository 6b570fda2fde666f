"""The states of all requests in the memory that vLLM allocates for its KV cache.

vLLM counts that memory in blocks of one size, and hands a request the numbers of its blocks. Here a request has one
block for its life, which holds its whole state in every layer, and the number of the block is the row of the state.
Where in the memory a row lies is nobody's concern but ours: nothing else reads a block, and none is copied or cleared.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec

from ckv_compile.cache import CacheShape, CacheState

_IN_BLOCKS = ("keys", "values", "queries", "last_queries", "degree")  # widest alignment first


@dataclass(frozen=True, kw_only=True)
class StateSpec(CircularBufferSpec):
    """One layer's share of a block: the state of one request, as if it were a single slot of a single head.

    vLLM takes a block for the tokens of one request up to `block_size`, so that is the longest request.
    """

    @classmethod
    def of(cls, spec: AttentionSpec, group: int, capacity: int, longest: int) -> "StateSpec":
        """The spec of a layer that keeps `capacity` slots for each KV head of `spec`, for requests up to `longest`.

        A KV head has `group` query heads, of which `spec` says nothing.
        """
        shape = CacheShape(1, spec.num_kv_heads, group, spec.head_size, spec.dtype, torch.device("meta"))
        return cls(
            block_size=longest,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            num_head_slots=1,
            tokens_per_state=longest,
            state_content_bytes=sum(part.nbytes for part in _in_blocks(CacheState.allocate(shape, capacity, 1))),
        )


def carve(memory: Tensor, shape: CacheShape, capacity: int, rows: int) -> CacheState:
    """Lay the states of `rows` requests into the memory of as many blocks, and allocate their counters beside it.

    Row 0 is not active: vLLM gives its block to rows that only fill up a batch.

    Args:
        memory: uint8 [bytes] of exactly `rows` blocks of all layers.
        shape: what a state must hold.
        capacity: slots per KV head.
        rows: blocks.

    Returns:
        A state whose numbers are whatever the memory held; a row with `fill`, `position`, `queries` and `last_queries`
        0 is empty.

    Raises:
        ValueError: if the memory has another size.
    """
    parts = _in_blocks(CacheState.allocate(shape._replace(device=torch.device("meta")), capacity, 1))
    sizes = [rows * part.nbytes for part in parts]
    if sum(sizes) != memory.numel():
        raise ValueError(f"{rows} states of {sum(sizes) // rows} bytes do not make up {memory.numel()} bytes of memory")
    carved = {
        name: region.view(part.dtype).view(rows, *part.shape[1:])
        for name, region, part in zip(_IN_BLOCKS, memory.split(sizes), parts, strict=True)
    }
    state = CacheState.allocate(shape._replace(layers=0, device=memory.device), capacity, rows)._replace(**carved)
    state.active[0] = False
    return state


def _in_blocks(state: CacheState) -> list[Tensor]:
    return [getattr(state, name) for name in _IN_BLOCKS]
