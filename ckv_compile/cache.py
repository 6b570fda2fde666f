"""The state of generation: one set of stacked tensors of fixed size, allocated once."""

import dataclasses
import weakref
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ckv_compile.errors import InputError
from ckv_compile.reference import LAST, accumulator_dtype
from ckv_compile.schedule import Plans
from ckv_compile.slots import STORED

Group = Literal["main", "light", "window"]
"""What kind of slots a layer has."""
_OWNER = "_ckv_cache"


class CacheShape(NamedTuple):
    """What a cache must hold: two groups of clustered layers, and that of sliding-window layers, which stay exact."""

    layers: int  # of the main group
    kv_heads: int
    group: int  # query heads of a KV head of a clustered layer
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int = 0  # tokens that a sliding-window layer sees, itself included
    window_layers: int = 0
    window_kv_heads: int = 0
    window_head_dim: int = 0
    light_layers: tuple[int, ...] = ()  # of the model: clustered layers with fewer slots, in all else like the others
    int8: bool = False  # whether the slots of clustered layers have 8 bits a number (see `slots`)

    @property
    def clustered(self) -> int:
        """Layers of both clustered groups."""
        return self.layers + len(self.light_layers)


class CacheState(NamedTuple):
    """The tensors every program takes, in the order of its arguments.

    The batch comes first, so that the state of one row is one contiguous block: prefill takes `row(b)` of any cache
    with the same strides, and a row can be copied or saved by itself.
    """

    keys: Tensor  # [B, L, Hkv, C, D] model dtype, or int8; slots, in sequence order
    values: Tensor  # [B, L, Hkv, C, D] likewise
    degree: Tensor  # [B, L, Hkv, C] float32; tokens a slot stands for, 0 = empty; with int8 [B, L, Hkv, C, 3]
    queries: Tensor  # [B, L, Hkv, 2, D] float32, or wider; running means of scale * q and its square
    last_queries: Tensor  # [B, L, Hkv, LAST, G, D] model dtype; scale * q of the token at position p in place p % LAST
    fill: Tensor  # [B] int64; used slots, the same in every layer and head
    active: Tensor  # [B] bool; rows that take tokens: a finished row of a batch is left as it is
    position: Tensor  # [B] int64; tokens seen, which RoPE uses
    window_keys: Tensor  # [B, Lw, Hkv, W, D] model dtype; token t of a sliding-window layer is in slot t % W
    window_values: Tensor  # [B, Lw, Hkv, W, D] model dtype
    light_keys: Tensor  # of the light layers, as above
    light_values: Tensor
    light_degree: Tensor
    light_queries: Tensor
    light_last_queries: Tensor
    light_fill: Tensor

    @classmethod
    def allocate(cls, shape: CacheShape, capacity: int, batch_size: int, light_capacity: int = 0) -> "CacheState":
        """Return an empty state of `batch_size` rows of `capacity` slots, and as many as given in light layers."""

        def zeros(*size: int, dtype: torch.dtype = shape.dtype) -> Tensor:
            return torch.zeros(batch_size, *size, dtype=dtype, device=shape.device)

        def group(layers: int, slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
            heads, dim = (layers, shape.kv_heads), shape.head_dim
            stored = torch.int8 if shape.int8 else shape.dtype
            return (
                zeros(*heads, slots, dim, dtype=stored),
                zeros(*heads, slots, dim, dtype=stored),
                zeros(*heads, slots, *([STORED] if shape.int8 else []), dtype=torch.float32),
                zeros(*heads, 2, dim, dtype=accumulator_dtype(shape.dtype)),
                zeros(*heads, LAST, shape.group, dim),
            )

        fill, light_fill, position = (zeros(dtype=torch.int64) for _ in range(3))
        active = torch.ones(batch_size, dtype=torch.bool, device=shape.device)
        ring = (shape.window_layers, shape.window_kv_heads, shape.window, shape.window_head_dim)
        main, light = group(shape.layers, capacity), group(len(shape.light_layers), light_capacity)
        return cls(*main, fill, active, position, zeros(*ring), zeros(*ring), *light, light_fill)

    @classmethod
    def planned(cls, shape: CacheShape, plans: Plans, batch_size: int) -> "CacheState":
        """Return an empty state of `batch_size` rows with the slots of a plan."""
        return cls.allocate(shape, plans.main.capacity, batch_size, plans.light.capacity)

    @property
    def main(self) -> tuple[Tensor, ...]:
        """What the ops take of the main group: keys, values, degree, queries, last_queries, fill, active, position."""
        return self[:8]

    @property
    def light(self) -> tuple[Tensor, ...]:
        """What the ops take of the light layers, likewise."""
        return (*self[10:], self.active, self.position)

    def row(self, index: int) -> "CacheState":
        """Return the state of one row as views of batch size 1."""
        return CacheState(*(tensor[index : index + 1] for tensor in self))


def cache_of(output: Any) -> Any:
    """The cache in an output of transformers, which renames `past_key_values` to `cache`."""
    return output.get("cache", output.get("past_key_values"))


class ClusteredCache(Cache):  # type: ignore[misc]
    """A clustered KV cache of fixed size, passed and returned as transformers' cache.

    It is a conversation: pass it to the next call to continue it, `fork` it to go on in two ways, `crop` the last
    tokens as far as they are still exact, `reset` it for another prompt without allocating. The model that it belongs
    to can save it (`save_cache`) and load it (`load_cache`).

    Holds `state` (see `CacheState`), the number of columns it has processed, and whether a step was interrupted
    half-way (`broken`).

    It is of one of two kinds: a cache of a transformed model (`transform`), whose programs alone read it; or one for an
    original model (`cache_for`), which calls `update` in every layer, in a forward that is compiled by the backend
    "ckv". An empty one of that kind also takes a prompt from a forward that is not compiled.

    Args:
        shape: what the model needs.
        plans: how it is compacted.
        state: allocated, of that shape.
        columns: tokens processed per row, padding included.
        groups: for an original model: the kind of each of its layers.
        positions: for an original model: positions that it has learned, if they end.
    """

    def __init__(
        self,
        shape: CacheShape,
        plans: Plans,
        state: CacheState,
        columns: int = 0,
        groups: tuple[Group, ...] | None = None,
        positions: int | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.shape = shape
        self.plans = plans
        self.state = state
        self.columns = columns
        self.groups = groups
        self.positions = positions
        self.broken = False
        self._padding: Tensor | None = None  # of the prompt that a model which is not compiled is at
        # A compiled forward knows the tensors only, and counts the columns here.
        setattr(state.position, _OWNER, weakref.ref(self))
        if groups is not None:
            for tensor in state:
                torch._dynamo.mark_static(tensor)
                torch._dynamo.mark_static_address(tensor, guard=False)

    @staticmethod
    def of(position: Tensor) -> "ClusteredCache":
        """The cache whose `state.position` this is."""
        cache = getattr(position, _OWNER, lambda: None)()
        assert isinstance(cache, ClusteredCache)
        return cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens processed per row, padding included: the logical length, not the slots in use.

        While Dynamo traces, it is that of the longest row, a tensor: a number would be a constant of the graph.
        """
        if torch.compiler.is_dynamo_compiling():
            return self.state.position.max()  # type: ignore[return-value]
        return self.columns

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Column of the first new token in the masks that transformers makes."""
        return 0 if torch.compiler.is_dynamo_compiling() else self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that the masks of transformers cover, and the first of them: those of the new tokens."""
        return query_length, self.get_query_offset()

    @property
    def batch_size(self) -> int:
        """Rows of the cache."""
        return self.state.fill.shape[0]

    @property
    def capacity(self) -> int:
        """Slots per KV head of a layer of the main group."""
        return self.state.keys.shape[3]

    @property
    def is_compileable(self) -> bool:
        """Whether transformers may compile the forward that gets this cache: that of an original model."""
        return self.groups is not None

    @property
    def is_croppable(self) -> bool:
        """False: not at every length, which is what transformers would need for assisted generation (see `crop`)."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """No layer is a linear-attention layer (transformers slices a continued prompt by this)."""
        return [False]

    def nbytes(self) -> int:
        """Bytes held by keys, values, degrees and what is known of queries, and by the sliding windows."""
        state = self.state
        clustered = (*state.main[:5], *state.light[:5])
        return sum(tensor.nbytes for tensor in (*clustered, state.window_keys, state.window_values))

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
        return ClusteredCache(self.shape, self.plans, state, self.columns, self.groups, self.positions)

    def __copy__(self) -> "ClusteredCache":
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ClusteredCache":
        return self.fork()

    def __reduce__(self) -> Any:
        """Refuse to be pickled: a cache needs the model that it belongs to."""
        raise InputError("a ClusteredCache cannot be pickled: save_cache() and load_cache() of its model use files")

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens, as far as the cache holds them one by one.

        That is all of them until the first compaction, and `n_recent` and what came after the last compaction from then
        on, in the layers that keep least. A sliding window cannot be taken back once it has moved: the tokens that left
        it are gone. What queries have left in their running means stays there, and the last queries stay until others
        take their places.

        Args:
            tokens_to_remove: minus the number of tokens, as in transformers.

        Raises:
            InputError: if that many cannot be taken back; the cache is then as it was.
        """
        self.check_whole()
        if not isinstance(tokens_to_remove, int) or tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove!r}): pass minus the number of tokens to take back, an int")
        count, state = -tokens_to_remove, self.state
        positions = state.position.tolist()
        groups = [
            (plan.schedule, fill, fill.tolist(), degree)
            for plan, fill, degree in (
                (self.plans.main, state.fill, state.degree),
                (self.plans.light, state.light_fill, state.light_degree),
            )
            if degree.shape[1]
        ]
        if self.batch_size > 1 and set(positions) != {self.columns}:
            raise InputError(
                "crop: the rows of this cache have padding, or ended at different lengths, so their last tokens are "
                "not those of the same columns; fork() before a turn that may be taken back"
            )
        for b, position in enumerate(positions):
            exact = position
            for schedule, _, used, _ in groups:
                if position > used[b]:
                    exact = min(exact, schedule.n_recent + used[b] - schedule.budget)
            if count and self.shape.window_layers and position > self.shape.window:
                exact = 0
            if count > exact:
                raise InputError(
                    f"crop({tokens_to_remove}): only the last {max(0, exact)} tokens can be taken back; older ones are "
                    "merged, or have left a sliding window; fork() before a turn that may be taken back"
                )
        for _, fill, used, degree in groups:
            for b, slots in enumerate(used):
                degree[b, :, :, max(0, slots - count) : slots] = 0.0
            fill.sub_(count).clamp_(min=0)
        state.position.sub_(count)
        self.columns = self.columns - count if any(position > count for position in positions) else 0

    def check_whole(self) -> None:
        """Refuse to go on from a step that was interrupted.

        Raises:
            InputError: if it was.
        """
        if self.broken:
            raise InputError("a step of this cache was interrupted half-way: reset() it and start again")

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take the new tokens of one layer of an original model, and return them: they attend to each other first.

        In a forward that the backend "ckv" compiles, it makes the attention that follows one over the cache. In one
        that is not compiled no mask reaches it, so padding must show in the positions, as `generate` passes them; nor
        do queries, so the exact slots of such a prompt are chosen without them.

        Args:
            key_states: [B, Hkv, S, D].
            value_states: [B, Hkv, S, D].
            layer_idx: layer of the model.
            *args: what transformers passes beside.
            **kwargs: what transformers passes beside; position_ids in it say what is padding.

        Raises:
            InputError: if the model is not compiled and the cache not empty, or the cache is of another model.
        """
        if self.groups is None:
            raise InputError(
                "this ClusteredCache only works with the model returned by ckv_compile.transform() that it belongs to; "
                "for the original model make one by ckv_compile.cache_for(), or use a cache of transformers' own"
            )
        if not 0 <= layer_idx < len(self.groups):
            raise InputError(f"layer {layer_idx} of a model, in a cache for {len(self.groups)} layers of another")
        group = self.groups[layer_idx]
        index = self.groups[:layer_idx].count(group)
        plan = dataclasses.astuple((self.plans.light if group == "light" else self.plans.main).schedule)
        if torch.compiler.is_dynamo_compiling():
            new: tuple[Tensor, Tensor] = torch.ops.ckv.update(
                key_states, value_states, *self.state, index, group, *plan
            )
            return new
        with torch.no_grad():
            if layer_idx == 0:
                self._begin(key_states, (kwargs.get("kwargs") or kwargs).get("position_ids"))
            torch.ops.ckv.append_(
                key_states.detach(), value_states.detach(), *self.state, index, group, *plan, self._padding
            )
            if layer_idx == len(self.groups) - 1:
                steps, state = key_states.shape[2], self.state
                main, light = (dataclasses.astuple(each.schedule) for each in self.plans)
                if self.shape.light_layers:
                    torch.ops.ckv.compact_(*state.light[:7], None, steps, *light, self._padding)
                torch.ops.ckv.compact_(*state.main, steps, *main, self._padding)
                self.columns += steps
                self.broken = False
        return key_states, value_states

    def _begin(self, keys: Tensor, position_ids: Tensor | None) -> None:
        """Prepare for the prompt of a model that is not compiled."""
        self.check_whole()
        if self.columns:
            raise InputError(
                "a model that is not compiled cannot continue a ClusteredCache: it would attend to centroids as if "
                'they were tokens. Compile its forward, model.forward = torch.compile(model.forward, backend="ckv"), '
                'or pass compile_config=CompileConfig(backend="ckv") to generate(), which then compiles on CUDA'
            )
        if (keys.shape[0], keys.dtype, keys.device) != (self.batch_size, self.shape.dtype, self.shape.device):
            raise InputError(
                f"new tokens of {keys.shape[0]} rows, {keys.dtype} on {keys.device}, for a cache of {self.batch_size} "
                f"rows, {self.shape.dtype} on {self.shape.device}"
            )
        if position_ids is None and self.batch_size > 1:
            raise InputError(
                "a model that is not compiled, of this version of transformers, does not tell its cache which tokens "
                'of a batch are padding: compile its forward, torch.compile(model.forward, backend="ckv")'
            )
        self._padding = None if position_ids is None else self.padding(position_ids)
        self.broken = True

    def padding(self, position_ids: Tensor) -> Tensor | None:
        """Columns of padding at the left of each row [B], told by the positions of new tokens [B or 1, S]; None if no.

        Raises:
            InputError: if the positions do not continue those in the cache.
        """
        steps, seen = position_ids.shape[-1], self.state.position
        found = position_ids.expand(self.batch_size, -1)
        padding = steps - (found[:, -1] + 1 - seen)
        columns = torch.arange(steps, device=found.device)
        expected = seen[:, None] + columns - padding[:, None]
        taken = columns >= padding[:, None]
        if not bool(((expected == found) | ~taken).all() & (padding >= 0).all() & (padding < steps).all()):
            raise InputError(
                f"position_ids end with {found[:, -1].tolist()} in rows of {steps} columns; the cache holds "
                f"{seen.tolist()} tokens, after which positions must go on, behind padding at the left"
            )
        return padding if bool(padding.any()) else None

    def reorder_cache(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to move rows."""
        raise InputError("the rows of a ClusteredCache cannot be reordered, repeated or selected")

    batch_repeat_interleave = batch_select_indices = reorder_cache
