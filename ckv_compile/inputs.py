"""What a call may pass: the checks of token ids, masks and caches, before anything is changed."""

from typing import Any

import torch
from torch import Tensor

from ckv_compile.cache import ClusteredCache
from ckv_compile.errors import InputError


def check_shape(input_ids: Tensor) -> None:
    """Refuse what is no batch of token ids.

    Raises:
        InputError: with what it should be.
    """
    if not isinstance(input_ids, Tensor):
        raise InputError(f"token ids are a tensor, got {type(input_ids).__name__}: use generate(**inputs) for a dict")
    if input_ids.ndim != 2 or input_ids.shape[0] == 0 or input_ids.shape[1] == 0:
        raise InputError(f"a prompt is [batch, tokens] with at least one token, got {tuple(input_ids.shape)}")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"token ids are int64, got {input_ids.dtype}")


def check_range(input_ids: Tensor, vocabulary: int) -> None:
    """Refuse token ids that the model has no embedding for. Waits for the device.

    Raises:
        InputError: if there are some.
    """
    low, high = (int(bound) for bound in torch.aminmax(input_ids))
    if low < 0 or high >= vocabulary:
        raise InputError(
            f"token ids from {low} to {high}; this model's are 0 to {vocabulary - 1}: "
            "was the prompt made by another tokenizer?"
        )


def check_positions(needed: int, limit: int | None) -> None:
    """Refuse to go on behind the last position that a model has.

    Args:
        needed: positions of the longest row.
        limit: positions of the model, learned or in a table; None if they do not end.

    Raises:
        InputError: if it has fewer.
    """
    if limit is not None and needed > limit:
        raise InputError(
            f"{needed} tokens in a row; this model has positions for {limit} and no more: use a shorter prompt or a "
            "smaller max_new_tokens"
        )


def left_padding(attention_mask: Tensor | None, cache: ClusteredCache, input_ids: Tensor) -> list[int]:
    """Columns of padding at the left of each row of `input_ids` [B, S].

    Args:
        attention_mask: [B, columns in the cache + S], or None where nothing is hidden.
        cache: the cache that the tokens continue.
        input_ids: [B, S].

    Raises:
        InputError: if the mask does not fit, hides a token in the middle or at the right, or a whole row, or does not
            agree with what the cache holds.
    """
    batch, steps = input_ids.shape
    if attention_mask is None:
        attention_mask = input_ids.new_ones(batch, cache.columns + steps)
    check_mask_shape(attention_mask, cache, input_ids)
    mask = attention_mask.bool()
    new = mask[:, cache.columns :]
    if not bool((new[:, 1:] >= new[:, :-1]).all()):
        raise InputError(
            "the attention_mask hides tokens that are not at the left: set tokenizer.padding_side='left' to pad "
            "prompts (generation goes on behind the last column of every row)"
        )
    if not bool(new[:, -1].all()):
        raise InputError("the attention_mask hides a whole row: every row needs at least one token")
    seen, shown = cache.state.position.tolist(), mask[:, : cache.columns].sum(dim=1).tolist()
    if seen != shown:
        raise InputError(
            f"the attention_mask shows {shown} earlier tokens of each row, but the cache holds {seen}: it must hide "
            "the padding of each row, also the padding behind a row that ended before the others"
        )
    return (steps - new.sum(dim=1)).tolist()


def check_mask_shape(attention_mask: Tensor, cache: ClusteredCache, input_ids: Tensor) -> None:
    """Refuse a mask that does not cover the columns of the cache and the new ones."""
    batch, steps = input_ids.shape
    if attention_mask.shape != (batch, cache.columns + steps):
        raise InputError(
            f"an attention_mask of {tuple(attention_mask.shape)} for {batch} rows with {cache.columns} columns in the "
            f"cache and {steps} new ones: it covers both"
        )


def check_continuation(prompt: Tensor, options: dict[str, Any]) -> None:
    """Refuse arguments of generate() from which transformers would cut the wrong columns when they continue a cache."""
    given = options.get("cache")
    cache = given if given is not None else options.get("past_key_values")
    if not isinstance(cache, ClusteredCache) or not cache.columns:
        return
    width, mask = prompt.shape[1], options.get("attention_mask")
    covered = width if mask is None else mask.shape[1]
    if covered == width <= cache.columns or covered not in (width, cache.columns + width):
        raise InputError(
            f"a prompt of {width} columns (attention_mask: {covered}) continues a cache of {cache.columns}: pass the "
            "whole conversation as input_ids, or the new turn with an attention_mask that covers the cache too; or "
            "reset() the cache to start another one"
        )
