"""What a budget costs in quality: a text's next tokens, predicted after its compressed beginning.

The reference is one uncached forward of the original model. Perplexity is that of the real tokens, KL is
KL(full || clustered) in nats a token, and agreement is how often both rank the same token first.
"""

import math
import pydoc_data.topics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ckv_compile.cache import cache_of
from ckv_compile.errors import InputError
from ckv_compile.model import transform


class Quality(NamedTuple):
    """What the predicted tokens of one budget were worth."""

    perplexity: float
    kl: float
    agreement: float


def text_of(tokenizer: Any, length: int, text: str | None = None) -> Tensor:
    """The first `length` tokens [1, length] of a text, by default the language reference that ships with CPython.

    Raises:
        InputError: if it has fewer.
    """
    text = "\n".join(pydoc_data.topics.topics.values()) if text is None else text
    ids = tokenizer(text, return_tensors="pt").input_ids
    if ids.shape[1] < length:
        raise InputError(f"the text has only {ids.shape[1]} tokens; ask for a shorter context than {length}")
    return ids[:, :length]  # type: ignore[no-any-return]


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, text: Tensor, budgets: Sequence[int], predicted: int, **options: Any
) -> Iterator[Quality]:
    """Predict the last tokens of a text one by one, each after the real ones before it, with each budget.

    Args:
        model: the original model, in evaluation mode.
        text: [1, S] int64; all but its last `predicted` tokens are the prompt that is compressed.
        budgets: slots per KV head; one of at least S merges nothing.
        predicted: tokens to predict.
        **options: other fields of `CKVConfig`.

    Raises:
        InputError: if the text is no longer than what is to be predicted.
        ConfigError: for a bad option.
    """
    if not 0 < predicted < text.shape[1]:
        raise InputError(f"{predicted} tokens to predict of a text of {text.shape[1]}: predict at least 1, and fewer")
    prompt, rest = text[:, :-predicted], text[:, -predicted:]
    full = model(text, logits_to_keep=predicted + 1).logits[0, :-1].float().log_softmax(dim=-1)
    for budget in budgets:
        ours = transform(model, budget=budget, compile="eager", **options)
        output = ours(prompt)
        cache = cache_of(output)
        logits = [output.logits]
        for token in rest[:, :-1].split(1, dim=1):
            logits.append(ours(token, past_key_values=cache).logits)
        yield quality_of(torch.cat(logits, dim=1)[0].float().log_softmax(dim=-1), full, rest[0])


def quality_of(found: Tensor, full: Tensor, tokens: Tensor) -> Quality:
    """Compare predictions with those of the full cache.

    Args:
        found: [n, vocabulary] log probabilities.
        full: [n, vocabulary] log probabilities with the full cache.
        tokens: [n] int64, the real ones.
    """
    return Quality(
        perplexity=math.exp(-found.gather(1, tokens[:, None]).mean()),
        kl=float(divergences(found, full).mean()),
        agreement=float((full.argmax(dim=-1) == found.argmax(dim=-1)).float().mean()),
    )


def divergences(found: Tensor, full: Tensor) -> Tensor:
    """KL(full || found) of each token [n], in nats, for log probabilities [n, vocabulary]."""
    return (full.exp() * (full - found)).sum(dim=-1)
