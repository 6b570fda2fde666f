"""A conversation on one cache: each turn prefills its own tokens alone."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ckv_compile.cache import ClusteredCache
from ckv_compile.errors import InputError
from ckv_compile.model import _CACHE_NAME, CKVForCausalLM


class Turn(NamedTuple):
    """What one turn was."""

    reply: str
    prefilled: int  # tokens that were not in the cache yet
    generated: int
    restarted: bool  # the template changed what the cache held, so everything was prefilled again


class Conversation:
    """Messages, and the cache of a model that has read them.

    Args:
        model: the compiled model.
        tokenizer: with a chat template.
        system: the system message, if there is one.

    Raises:
        InputError: if the tokenizer has no chat template.
    """

    def __init__(self, model: CKVForCausalLM, tokenizer: Any, system: str | None = None) -> None:
        check_template(tokenizer)
        self.model = model
        self.tokenizer = tokenizer
        self.system = system
        self.cache = model.new_cache()
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.cache.reset()
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.tokens: list[int] = []  # those in the cache

    def turn(self, text: str, **options: Any) -> Turn:
        """Add a message of the user and generate the reply; `options` are those of `generate`.

        Templates may rewrite earlier turns, and a reply read as text may split into other tokens than were generated:
        then the cache holds another conversation, and starts again.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        encoded = encode_chat(self.tokenizer, messages)
        ids = encoded["input_ids"]
        restarted = ids[0, : len(self.tokens)].tolist() != self.tokens
        if restarted:
            self.cache.reset()
        known, length = self.cache.get_seq_length(), ids.shape[1]
        output = generate_on(self.cache, self.model, encoded, **options)
        new = output[0, length:].tolist()
        self.tokens = output[0, : self.cache.get_seq_length()].tolist()  # the last one has not been read yet
        reply = self.tokenizer.decode(new, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        return Turn(reply, length - known, len(new), restarted)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a file, and the messages to another with `.json` behind its name.

        Raises:
            OSError: if they cannot be written.
        """
        self.model.save_cache(self.cache, path)
        talk = {"messages": self.messages, "tokens": self.tokens}
        _beside(path).write_text(json.dumps(talk, ensure_ascii=False), encoding="utf-8")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from what `save` wrote; if that fails, the conversation is as it was.

        Raises:
            InputError: if the files are of another model or configuration, or damaged.
            OSError: if they cannot be read.
        """
        cache = self.model.load_cache(path)
        try:
            talk = json.loads(_beside(path).read_text(encoding="utf-8"))
            messages, tokens = talk["messages"], talk["tokens"]
            whole = all({*map(type, each.values())} == {str} and {*each} == {"role", "content"} for each in messages)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{_beside(path)} holds no conversation ({type(error).__name__}: {error})") from error
        if not whole or len(tokens) != cache.get_seq_length():
            raise InputError(
                f"{_beside(path)} is not the conversation of {path}: they are written together, by /save or save()"
            )
        self.cache, self.messages, self.tokens = cache, messages, tokens


def generate_on(cache: ClusteredCache, model: CKVForCausalLM, encoded: Any, **options: Any) -> Tensor:
    """Generate after encoded text [1, S], which begins with what the cache has read; return all tokens [1, S + new]."""
    output: Tensor = model.generate(**encoded.to(model.device), **{_CACHE_NAME: cache}, **options)
    return output


def encode_chat(tokenizer: Any, messages: list[dict[str, str]]) -> Any:
    """The tokens of a conversation up to where the reply begins: input_ids and attention_mask [1, S].

    Raises:
        InputError: if the tokenizer has no chat template.
    """
    check_template(tokenizer)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def check_template(tokenizer: Any) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        InputError: with what to do.
    """
    if not tokenizer.chat_template:
        raise InputError("the tokenizer of this model has no chat template: use `ckv generate --no-chat`")


def _beside(path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(path)}.json")
