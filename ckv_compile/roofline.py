"""The floor of a decode step on a GPU: the bytes that it must move over the bandwidth of the chip's memory.

A decode step of few rows does little arithmetic; what it cannot do without is reading every weight once and every used
slot of every row once. A compaction reads and writes the whole cache, once every `interval` steps.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel


class GPU(NamedTuple):
    """A chip by its data sheet."""

    bandwidth: float  # bytes per second
    memory: float  # bytes


GPUS = {
    "H200": GPU(4.8e12, 141e9),
    "H100": GPU(3.35e12, 80e9),  # SXM
    "A100": GPU(2.039e12, 80e9),  # SXM, 80 GB
    "L4": GPU(300e9, 24e9),
}


class Shape(NamedTuple):
    """What a decode step of a model reads."""

    weights: int  # bytes
    slot: int  # bytes of keys and values of one token, in all layers
    heads: int  # KV heads in all layers: as many degrees of 4 bytes belong to a slot

    @property
    def clustered_slot(self) -> int:
        """Bytes of one slot of the clustered cache."""
        return self.slot + 4 * self.heads


class Floor(NamedTuple):
    """Bytes and seconds of one decode step."""

    context: int
    batch: int
    kept: float
    full_bytes: float
    clustered_bytes: float  # with the share of a compaction
    full_seconds: float
    clustered_seconds: float
    full_fits: bool
    clustered_fits: bool

    @property
    def speedup(self) -> float:
        """Floor with the full cache over floor with the clustered one: no implementation of these bytes gains more."""
        return self.full_seconds / self.clustered_seconds


def llama_8b() -> LlamaConfig:
    """The shape of Llama-3.1-8B: 32 layers, 32 query and 8 KV heads of 128, 8.03 billion weights."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        tie_word_embeddings=False,
    )


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that one decode step reads; an embedding that is not tied to the head is only looked up."""
    total = sum(_stored_bytes(parameter) for parameter in model.parameters())  # a tied weight comes once
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if embedding is head else total - _stored_bytes(embedding)


def _stored_bytes(tensor: Tensor) -> int:
    """Bytes that a tensor holds: a quantised one says `nbytes` of the dtype it computes in."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return sum(_stored_bytes(getattr(tensor, name)) for name in flatten()[0]) if flatten else int(tensor.nbytes)


def shape_of(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> Shape:
    """Read a shape from a model's config, without allocating its weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    text = config.get_text_config(decoder=True)
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = text.num_hidden_layers * kv_heads
    return Shape(weight_bytes(model), 2 * heads * head_dim * dtype.itemsize, heads)


def floors(
    gpu: GPU,
    shape: Shape,
    contexts: Iterable[int],
    kept: Iterable[float],
    batches: Iterable[int],
    interval: int = 64,
) -> Iterator[Floor]:
    """The floor of a decode step for every combination of context, kept fraction and batch size.

    Args:
        gpu: the chip.
        shape: the model.
        contexts: tokens that each row has seen.
        kept: budget as a fraction of the context, in (0, 1].
        batches: rows.
        interval: decode steps between compactions.
    """
    batches, kept = tuple(batches), tuple(kept)
    for context in contexts:
        for batch in batches:
            full = batch * context * shape.slot
            for fraction in kept:
                cache = batch * (fraction * context + interval) * shape.clustered_slot
                read = batch * (fraction * context + interval / 2) * shape.clustered_slot  # the mean over an interval
                compaction = 2 * cache / interval if fraction < 1 else 0.0
                full_bytes, clustered_bytes = shape.weights + full, shape.weights + read + compaction
                yield Floor(
                    context,
                    batch,
                    fraction,
                    full_bytes,
                    clustered_bytes,
                    full_bytes / gpu.bandwidth,
                    clustered_bytes / gpu.bandwidth,
                    shape.weights + full <= gpu.memory,
                    shape.weights + cache <= gpu.memory,
                )


def largest_batch(gpu: GPU, shape: Shape, context: int, kept: float | None = None, interval: int = 64) -> int:
    """Rows that fit in memory beside the weights, activations not counted; with the full cache if `kept` is None."""
    row = context * shape.slot if kept is None else (kept * context + interval) * shape.clustered_slot
    return max(0, int((gpu.memory - shape.weights) // row))
