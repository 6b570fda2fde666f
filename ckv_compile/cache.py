"""The state of generation: one set of stacked tensors of fixed size, allocated once."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ckv_compile.errors import InputError
from ckv_compile.schedule import Schedule


class CacheShape(NamedTuple):
    """What a cache must hold: the group of clustered layers, and that of sliding-window layers, which stay exact."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int = 0  # tokens that a sliding-window layer sees, itself included
    window_layers: int = 0
    window_kv_heads: int = 0
    window_head_dim: int = 0


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
    window_keys: Tensor  # [B, Lw, Hkv, W, D] model dtype; token t of a sliding-window layer is in slot t % W
    window_values: Tensor  # [B, Lw, Hkv, W, D] model dtype

    @classmethod
    def allocate(cls, shape: CacheShape, capacity: int, batch_size: int) -> "CacheState":
        """Return an empty state of `batch_size` rows of `capacity` slots."""
        slots = (batch_size, shape.layers, shape.kv_heads, capacity)
        ring = (batch_size, shape.window_layers, shape.window_kv_heads, shape.window, shape.window_head_dim)
        return cls(
            keys=torch.zeros(*slots, shape.head_dim, dtype=shape.dtype, device=shape.device),
            values=torch.zeros(*slots, shape.head_dim, dtype=shape.dtype, device=shape.device),
            degree=torch.zeros(slots, dtype=torch.float32, device=shape.device),
            fill=torch.zeros(batch_size, dtype=torch.int64, device=shape.device),
            active=torch.ones(batch_size, dtype=torch.bool, device=shape.device),
            position=torch.zeros(batch_size, dtype=torch.int64, device=shape.device),
            window_keys=torch.zeros(ring, dtype=shape.dtype, device=shape.device),
            window_values=torch.zeros(ring, dtype=shape.dtype, device=shape.device),
        )

    def row(self, index: int) -> "CacheState":
        """Return the state of one row as views of batch size 1."""
        return CacheState(*(tensor[index : index + 1] for tensor in self))


class ClusteredCache(Cache):  # type: ignore[misc]
    """A clustered KV cache of fixed size, passed and returned as transformers' cache.

    It is a conversation: pass it to the next call to continue it, `fork` it to go on in two ways, `crop` the last
    tokens as far as they are still exact, `reset` it for another prompt without allocating. The model that it belongs
    to can save it (`save_cache`) and load it (`load_cache`).

    Holds `state` (see `CacheState`), the number of columns it has processed, and whether a step was interrupted
    half-way (`broken`).

    Args:
        shape: what the model needs.
        schedule: how it is compacted.
        state: allocated, of that shape.
        columns: tokens processed per row, padding included.
    """

    def __init__(self, shape: CacheShape, schedule: Schedule, state: CacheState, columns: int = 0) -> None:
        super().__init__(layers=[])
        self.shape = shape
        self.schedule = schedule
        self.state = state
        self.columns = columns
        self.broken = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens processed per row, padding included: the logical length, not the slots in use."""
        return self.columns

    @property
    def batch_size(self) -> int:
        """Rows of the cache."""
        return self.state.fill.shape[0]

    @property
    def capacity(self) -> int:
        """Slots per KV head of a clustered layer."""
        return self.state.keys.shape[3]

    @property
    def is_compileable(self) -> bool:
        """False: the programs that use this cache are compiled already; transformers must not compile again."""
        return False

    @property
    def is_croppable(self) -> bool:
        """False: not at every length, which is what transformers would need for assisted generation (see `crop`)."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """No layer is a linear-attention layer (transformers slices a continued prompt by this)."""
        return [False]

    def nbytes(self) -> int:
        """Bytes held by keys, values and degrees, of the clustered layers and of the sliding windows."""
        state = self.state
        return sum(
            tensor.nbytes for tensor in (state.keys, state.values, state.degree, state.window_keys, state.window_values)
        )

    def reset(self) -> None:
        """Empty the cache: nothing of what it held can be read again."""
        for tensor in self.state:
            tensor.zero_()
        self.state.active.fill_(True)
        self.columns = 0
        self.broken = False

    def fork(self) -> "ClusteredCache":
        """Return a copy that goes on by itself.

        Raises:
            InputError: if a step of this cache was interrupted half-way.
        """
        self.check_whole()
        with torch.inference_mode(False):
            state = CacheState(*(tensor.clone() for tensor in self.state))
        return ClusteredCache(self.shape, self.schedule, state, self.columns)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, as far as the cache holds them one by one.

        That is all of them until the first compaction, and `n_recent` and what came after the last compaction from then
        on. A sliding window cannot be taken back once it has moved: the tokens that left it are gone.

        Args:
            tokens_to_remove: minus the number of tokens, as in transformers.

        Raises:
            InputError: if that many cannot be taken back; the cache is then as it was.
        """
        self.check_whole()
        if not isinstance(tokens_to_remove, int) or tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove!r}): pass minus the number of tokens to take back, an int")
        count, state = -tokens_to_remove, self.state
        fills, positions = state.fill.tolist(), state.position.tolist()
        if self.batch_size > 1 and set(positions) != {self.columns}:
            raise InputError(
                "crop: the rows of this cache have padding, or ended at different lengths, so their last tokens are "
                "not those of the same columns; fork() before a turn that may be taken back"
            )
        for fill, position in zip(fills, positions, strict=True):
            exact = position
            if self.shape.layers and position > fill:
                exact = self.schedule.n_recent + fill - self.schedule.budget
            if count and self.shape.window_layers and position > self.shape.window:
                exact = 0
            if count > exact:
                raise InputError(
                    f"crop({tokens_to_remove}): only the last {max(0, exact)} tokens can be taken back; older ones are "
                    "merged, or have left a sliding window; fork() before a turn that may be taken back"
                )
        for b, fill in enumerate(fills):
            state.degree[b, :, :, max(0, fill - count) : fill] = 0.0
        state.fill.sub_(count).clamp_(min=0)
        state.position.sub_(count)
        self.columns = self.columns - count if any(position > count for position in positions) else 0

    def check_whole(self) -> None:
        """Refuse to go on from a step that was interrupted.

        Raises:
            InputError: if it was.
        """
        if self.broken:
            raise InputError("a step of this cache was interrupted half-way: reset() it and start again")

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse to be used by an uncompiled model, which would attend to centroids as if they were tokens."""
        raise InputError(
            "a ClusteredCache only works with a model returned by ckv_compile.transform(); "
            "the original model needs a cache of transformers' own"
        )

    def reorder_cache(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to move rows."""
        raise InputError("the rows of a ClusteredCache cannot be reordered, repeated or selected")

    batch_repeat_interleave = batch_select_indices = reorder_cache
