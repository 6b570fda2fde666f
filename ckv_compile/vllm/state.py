"""The states of all requests in the memory that vLLM allocates for its KV cache.

vLLM counts that memory in blocks of one size, and hands a request the numbers of its blocks. Here a request has one
block for its life, which holds its whole state in every layer, and the number of the block is the row of the state.
Where in the memory a row lies is nobody's concern but ours: nothing else reads a block, and none is copied or cleared.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec

from ckv_compile.cache import CacheShape, CacheState
from ckv_compile.config import CKVConfig
from ckv_compile.errors import ConfigError
from ckv_compile.schedule import Plans

_GROUPS = ("", "light_")
_PARTS = ("keys", "values", "last_queries", "queries", "degree")  # multiples of the head size come before degrees
_IN_BLOCKS = [group + part for part in _PARTS for group in _GROUPS]
_ALIGNED = 4  # bytes: a layer's share of a block is a multiple of them, so that it can be seen as float32


class Serving(NamedTuple):
    """What the layers of a process keep of a request."""

    config: CKVConfig
    longest: int  # tokens of a request
    layers: int
    heads: int  # that query, in this process

    @property
    def plans(self) -> Plans:
        """How the two groups of layers are compacted.

        Raises:
            ConfigError: for a light layer that there is not, or where all are light.
        """
        if any(layer >= self.layers for layer in self.config.light_layers):
            raise ConfigError(
                f"light_layers={list(self.config.light_layers)}: the layers of this model are 0 to {self.layers - 1}"
            )
        return self.config.plans(self.layers)

    def shape(self, spec: AttentionSpec, device: torch.device) -> CacheShape:
        """The shape of the state of layers that have the heads of `spec`."""
        light = tuple(self.config.light_layers)
        heads = (spec.num_kv_heads, self.heads // spec.num_kv_heads)
        sizes = (self.layers - len(light), *heads, spec.head_size, spec.dtype, device)
        return CacheShape(*sizes, light_layers=light, int8=self.config.cache_dtype == "int8")

    def one(self, spec: AttentionSpec) -> CacheState:
        """The state of one request, without memory."""
        return CacheState.planned(self.shape(spec, torch.device("meta")), self.plans, 1)


@dataclass(frozen=True, kw_only=True)
class StateSpec(CircularBufferSpec):
    """One layer's share of a block: of the state of one request, as if it were a single slot of a single head.

    The shares of all layers are alike, though light layers keep less. vLLM takes a block for the tokens of one request,
    up to `block_size`, so that is the longest request.
    """

    @classmethod
    def of(cls, spec: AttentionSpec, serving: Serving) -> "StateSpec":
        """The spec of a layer whose keys and values are those of `spec`."""
        whole = sum(part.nbytes for part in _in_blocks(serving.one(spec)))
        return cls(
            block_size=serving.longest,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            num_head_slots=1,
            tokens_per_state=serving.longest,
            state_content_bytes=-(-whole // (serving.layers * _ALIGNED)) * _ALIGNED,
        )


def carve(memory: Tensor, serving: Serving, spec: AttentionSpec, rows: int) -> CacheState:
    """Lay the states of `rows` requests into the memory of as many blocks, and allocate their counters beside it.

    Row 0 is not active: vLLM gives its block to rows that only fill up a batch.

    Args:
        memory: uint8 [bytes] of `rows` blocks of all layers.
        serving: what a state must hold.
        spec: of a layer.
        rows: blocks.

    Returns:
        A state whose numbers are whatever the memory held: see `empty`.

    Raises:
        ValueError: if the memory is too small.
    """
    parts = _in_blocks(serving.one(spec))
    sizes = [rows * part.nbytes for part in parts]
    if sum(sizes) > memory.numel():
        raise ValueError(f"{rows} states of {sum(sizes) // rows} bytes do not fit in {memory.numel()} bytes of memory")
    starts = [0, *itertools.accumulate(sizes)]
    carved = {
        name: memory[start : start + size].view(part.dtype).view(rows, *part.shape[1:])
        for name, start, size, part in zip(_IN_BLOCKS, starts, sizes, parts, strict=False)
    }
    shape = serving.shape(spec, memory.device)._replace(layers=0, light_layers=())
    state = CacheState.allocate(shape, 0, rows)._replace(**carved)
    state.active[0] = False
    return state


def empty(state: CacheState, rows: Tensor) -> None:
    """Make rows [R] int64 of a state those of requests that have no tokens: their slots are not read then."""
    counters = (state.fill, state.light_fill, state.position)
    for part in (*counters, state.queries, state.last_queries, state.light_queries, state.light_last_queries):
        part.index_fill_(0, rows, 0)


def _in_blocks(state: CacheState) -> list[Tensor]:
    return [getattr(state, name) for name in _IN_BLOCKS]
