"""What fits in a memory: weights, caches and a prefill, by arithmetic on a model's config alone.

    weights + activations of one row's prefill + rows * cache of a row <= memory

Weights and caches are exact. Activations are an estimate: two hidden states and three intermediate ones for every
token that is prefilled at once, as a dense gated MLP holds them. What an allocator, libraries and a CUDA context take
comes on top: peaks measured on a CPU were 40 to 190 MB above it.
"""

import bisect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ckv_compile.cache import CacheShape, CacheState, ClusteredCache, cache_of
from ckv_compile.config import CacheDtype, CKVConfig
from ckv_compile.errors import CKVError, UnsupportedModelError
from ckv_compile.schedule import GroupPlan, Plans

MOST_TOKENS = 2**31
"""A context that fits at this length counts as one without an end."""


class Layer(NamedTuple):
    """What one layer caches of a token."""

    kv_heads: int
    heads: int  # that query
    key_dim: int
    value_dim: int
    window: int  # tokens that it sees, itself included; 0 = all


class Footprint(NamedTuple):
    """What the memory of a model depends on."""

    dtype: torch.dtype
    weights: int  # bytes
    activations: int  # bytes for every token of a prompt that is processed at once, about
    layers: tuple[Layer, ...]
    context: int | None  # tokens, max_position_embeddings
    uneven: bool  # attention reads something else than what a layer caches, or more often

    def shape(self, context: int) -> CacheShape:
        """What a clustered cache must hold, if the longest context is `context` tokens or the model's own.

        Raises:
            UnsupportedModelError: if layers of a kind differ, which `transform` refuses too; or where a clustered cache
                does not hold what transformers' own does.
        """
        if self.uneven or any(not layer.kv_heads or not layer.heads for layer in self.layers):
            raise UnsupportedModelError(
                "this model has latent attention, or layers that share keys and values or attend to them twice; what a "
                "clustered cache holds of them cannot be told from the config: use `ckv inspect`, which loads the model"
            )
        longest = max(context, self.context or 0)
        whole = {layer._replace(window=0) for layer in self.layers if not 0 < layer.window < longest}
        windowed = {layer for layer in self.layers if 0 < layer.window < longest}
        if len(whole) > 1 or len(windowed) > 1:
            raise UnsupportedModelError(
                f"layers of this model differ in what they cache ({whole or windowed}): transform() refuses it"
            )
        kind = next(iter(whole or windowed))
        ring = next(iter(windowed), Layer(0, 0, 0, 0, 0))
        count = sum(0 < layer.window < longest for layer in self.layers)
        return CacheShape(
            layers=len(self.layers) - count,
            kv_heads=kind.kv_heads,
            group=kind.heads // kind.kv_heads,
            head_dim=max(kind.key_dim, kind.value_dim),
            dtype=self.dtype,
            device=torch.device("meta"),
            window=ring.window,
            window_layers=count,
            window_kv_heads=ring.kv_heads,
            window_head_dim=max(ring.key_dim, ring.value_dim),
        )

    def full_bytes(self, context: int) -> int:
        """Bytes of transformers' own cache of one row of `context` tokens: all of them, or the last of a window."""
        return sum(
            (min(context, layer.window - 1) if layer.window else context)
            * layer.kv_heads
            * (layer.key_dim + layer.value_dim)
            * self.dtype.itemsize
            for layer in self.layers
        )

    def prefill_bytes(self, context: int, chunk: int | None) -> int:
        """About the bytes of activations of a prefill of one row, at once or in chunks."""
        return self.activations * min(context, chunk or context)


def row_bytes(shape: CacheShape, slots: int, light_slots: int = 0) -> int:
    """Bytes of one row of a clustered cache of so many slots in a layer, and in a light one, without allocating it."""
    schedule = CKVConfig(budget=MOST_TOKENS).schedule  # any: bytes do not depend on it
    plans = Plans(GroupPlan(schedule, slots), GroupPlan(schedule, light_slots))
    state = CacheState.allocate(shape._replace(device=torch.device("meta")), slots, 1, light_slots)
    return ClusteredCache(shape, plans, state).nbytes()


def measure(config: PreTrainedConfig, dtype: torch.dtype) -> Footprint:
    """Read a footprint from a model's config, without its weights.

    Args:
        config: of a decoder-only model.
        dtype: of weights and caches.

    Raises:
        UnsupportedModelError: if the model does not run without numbers, or caches something else than keys and values.
    """
    name = type(config).__name__
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
            model.set_experts_implementation("batched_mm")  # the default looks at numbers to choose experts
            footprint = footprint_of(model)
    except CKVError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} does not run without its weights ({type(error).__name__}: {error}): use `ckv inspect`, which "
            "loads the model"
        ) from error
    return footprint


def footprint_of(model: PreTrainedModel) -> Footprint:
    """Read a footprint from a model, on any device, by a forward of two tokens.

    Raises:
        UnsupportedModelError: if it caches something else than keys and values.
    """
    text = model.config.get_text_config(decoder=True)
    with torch.no_grad(), _Attentions() as attentions:
        output = model(torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=True)
    cached = cache_of(output).layers
    # No calls at all are those of a model with another function for its attention.
    uneven = len(attentions.heads) not in (0, len(cached))
    each_heads = (
        [getattr(text, "num_attention_heads", 0)] * len(cached) if uneven or not attentions.heads else attentions.heads
    )
    layers = []
    for layer, heads in zip(cached, each_heads, strict=True):
        if isinstance(layer, DynamicLayer):
            window = layer.sliding_window if layer.is_sliding else 0
            layers.append(Layer(layer.keys.shape[1], heads, layer.keys.shape[3], layer.values.shape[3], window))
        elif getattr(layer, "keys", layer) is None:
            layers.append(Layer(0, 0, 0, 0, 0))  # it reads what another layer cached
        else:
            raise UnsupportedModelError(
                f"{type(model).__name__} caches a {type(layer).__name__}: only caches of keys and values can be planned"
            )
    intermediate = getattr(text, "intermediate_size", None) or 0
    width = 2 * text.hidden_size + 3 * (max(intermediate) if isinstance(intermediate, list) else intermediate)
    return Footprint(
        model.dtype,
        sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        width * model.dtype.itemsize,
        tuple(layers),
        context_of(model.config),
        bool(getattr(text, "kv_lora_rank", None)) or uneven,
    )


class _Attentions(TorchFunctionMode):
    """Lists the query heads of every call of scaled_dot_product_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.heads.append((args[0] if args else kwargs["query"]).shape[-3])
        return func(*args, **kwargs)


def slots_of(budget: int | float, context: int) -> int:
    """Slots of a budget: its own number, or that share of a context."""
    return budget if isinstance(budget, int) else round(budget * context)


def context_of(config: PreTrainedConfig) -> int | None:
    """The longest context that a config names, in tokens."""
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or 0
    return context if context > 0 else None  # -1 where there is no end


class Plan(NamedTuple):
    """A cache to plan for.

    Args:
        budget: slots per KV head (int), the kept share of the context (float), or None for transformers' own cache.
        interval: decode steps between compactions.
        prefill_chunk: tokens of a prompt that are processed at once; None takes all.
        cache_dtype: of the cache, as in `CKVConfig`.
    """

    budget: int | float | None
    interval: int = 64
    prefill_chunk: int | None = None
    cache_dtype: CacheDtype = "auto"

    def row_bytes(self, footprint: Footprint, context: int) -> int:
        """Bytes of the cache of one row whose longest context is `context` tokens."""
        if self.budget is None:
            return footprint.full_bytes(context)
        shape = footprint.shape(context)._replace(int8=self.cache_dtype == "int8")
        return row_bytes(shape, slots_of(self.budget, context) + self.interval)

    def needed(self, footprint: Footprint, context: int, batch: int) -> int:
        """Bytes of weights, caches and one row's prefill; that of the full cache is taken row by row too."""
        prefill = footprint.prefill_bytes(context, self.prefill_chunk)
        return footprint.weights + prefill + batch * self.row_bytes(footprint, context)

    def largest_batch(self, footprint: Footprint, memory: int, context: int) -> int:
        """The most rows of `context` tokens that fit in `memory` bytes."""
        free = memory - self.needed(footprint, context, batch=0)
        return max(0, free // self.row_bytes(footprint, context))

    def longest_context(self, footprint: Footprint, memory: int, batch: int) -> int | None:
        """The longest context of `batch` rows that fits in `memory` bytes; None if every one does."""
        contexts = range(1, MOST_TOKENS)
        fitting = bisect.bisect_right(contexts, memory, key=lambda context: self.needed(footprint, context, batch))
        return None if fitting == len(contexts) else fitting
