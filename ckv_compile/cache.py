"""The state of generation: one set of stacked tensors of fixed size, allocated once."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ckv_compile.errors import InputError


class CacheShape(NamedTuple):
    """What all attention layers of a model have in common."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class CacheState(NamedTuple):
    """The tensors every program takes, in the order of its arguments.

    The batch comes first, so that the state of one row is one contiguous block: prefill takes `row(b)` of any cache
    with the same strides, and a row can be copied or saved by itself.
    """

    keys: Tensor  # [B, L, Hkv, C, D] model dtype; slots, in sequence order
    values: Tensor  # [B, L, Hkv, C, D] model dtype
    degree: Tensor  # [B, L, Hkv, C] float32; tokens a slot stands for, 0 = empty
    fill: Tensor  # [B] int64; used slots, the same in every layer and head
    active: Tensor  # [B] bool; rows that take tokens: a finished row of a batch is left as it is
    position: Tensor  # [B] int64; tokens seen, which RoPE uses

    @classmethod
    def allocate(cls, shape: CacheShape, capacity: int, batch_size: int) -> "CacheState":
        """Return an empty state of `batch_size` rows of `capacity` slots."""
        slots = (batch_size, shape.layers, shape.kv_heads, capacity)
        return cls(
            keys=torch.zeros(*slots, shape.head_dim, dtype=shape.dtype, device=shape.device),
            values=torch.zeros(*slots, shape.head_dim, dtype=shape.dtype, device=shape.device),
            degree=torch.zeros(slots, dtype=torch.float32, device=shape.device),
            fill=torch.zeros(batch_size, dtype=torch.int64, device=shape.device),
            active=torch.ones(batch_size, dtype=torch.bool, device=shape.device),
            position=torch.zeros(batch_size, dtype=torch.int64, device=shape.device),
        )

    def row(self, index: int) -> "CacheState":
        """Return the state of one row as views of batch size 1."""
        return CacheState(*(tensor[index : index + 1] for tensor in self))


class ClusteredCache(Cache):  # type: ignore[misc]
    """A clustered KV cache of fixed size, passed and returned as transformers' cache.

    Holds `state` (see `CacheState`), the number of columns it has processed, and whether a step was interrupted
    half-way (`broken`). `reset()` empties it for the next prompt without allocating.
    """

    def __init__(self, shape: CacheShape, capacity: int, batch_size: int) -> None:
        super().__init__(layers=[])
        self.state = CacheState.allocate(shape, capacity, batch_size)
        self.columns = 0
        self.broken = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens processed per row, padding included: the logical length, not the slots in use."""
        return self.columns

    @property
    def batch_size(self) -> int:
        """Rows of the cache."""
        return self.state.fill.shape[0]

    @property
    def is_compileable(self) -> bool:
        """False: the programs that use this cache are compiled already; transformers must not compile again."""
        return False

    @property
    def is_croppable(self) -> bool:
        """False: merged tokens cannot be taken apart again."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """No layer is a linear-attention layer (transformers slices a continued prompt by this)."""
        return [False]

    def nbytes(self) -> int:
        """Bytes held by the keys, values and degrees."""
        return sum(tensor.nbytes for tensor in (self.state.keys, self.state.values, self.state.degree))

    def reset(self) -> None:
        """Empty the cache: nothing of what it held can be read again."""
        for tensor in self.state:
            tensor.zero_()
        self.state.active.fill_(True)
        self.columns = 0
        self.broken = False

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse to be used by an uncompiled model, which would attend to centroids as if they were tokens."""
        raise InputError(
            "a ClusteredCache only works with a model returned by ckv_compile.transform(); "
            "the original model needs a cache of transformers' own"
        )

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to remove tokens."""
        raise InputError("a ClusteredCache cannot be cropped: merged tokens cannot be taken apart again; use reset()")

    def reorder_cache(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to move rows."""
        raise InputError("the rows of a ClusteredCache cannot be reordered, repeated or selected")

    batch_repeat_interleave = batch_select_indices = reorder_cache
