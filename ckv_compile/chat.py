"""A conversation on one cache: each turn prefills its own tokens alone."""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ckv_compile.cache import ClusteredCache
from ckv_compile.errors import InputError
from ckv_compile.model import CKVForCausalLM


class Turn(NamedTuple):
    """What one turn was."""

    reply: str
    prefilled: int  # tokens that were not in the cache yet
    generated: int
    restarted: bool  # the cache held something else than this conversation, so everything was prefilled again


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
        self.tokens: list[int] = []  # those in the cache
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._empty()

    def turn(self, text: str, **options: Any) -> Turn:
        """Add a message of the user and generate the reply; `options` are those of `generate`.

        Templates may rewrite earlier turns, and a reply read as text may split into other tokens than were generated:
        then the cache holds another conversation, and starts again. So it does after a turn that failed or was
        interrupted, whose message is forgotten.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        encoded = encode_chat(self.tokenizer, messages)
        ids = encoded["input_ids"]
        # The last token is left to read, even where the cache holds all of them.
        restarted = not self._in_step() or ids[0, :-1].tolist()[: len(self.tokens)] != self.tokens
        if restarted:
            self._empty()
        known, length = self.cache.get_seq_length(), ids.shape[1]
        output = generate_on(self.cache, self.model, encoded, **options)
        new = output[0, length:].tolist()
        self.tokens = output[0, : self.cache.get_seq_length()].tolist()  # the last one has not been read yet
        reply = self.tokenizer.decode(new, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        return Turn(reply, length - known, len(new), restarted)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a file, and the messages to another with `.json` behind its name.

        An earlier save stays until both are written.

        Raises:
            OSError: if they cannot be written.
        """
        if not self._in_step():
            self._empty()  # the messages are whole, and what the cache lacks is read with the next turn
        target = Path(path)
        if not target.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {target.parent}")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".saving-") as folder:
            scratch = Path(folder, target.name)
            self.model.save_cache(self.cache, scratch)
            talk = {"cache": _digest(scratch), "messages": self.messages, "tokens": self.tokens}
            _beside(scratch).write_text(json.dumps(talk, ensure_ascii=False), encoding="utf-8")
            scratch.replace(target)
            _beside(scratch).replace(_beside(target))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from what `save` wrote; if that fails, the conversation is as it was.

        Raises:
            InputError: if the files are of another model or configuration, damaged, or not of one save.
            OSError: if they cannot be read.
        """
        cache = self.model.load_cache(path)
        try:
            talk = json.loads(_beside(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{_beside(path)} holds no conversation ({type(error).__name__}: {error})") from error
        if not _is_talk(talk):
            raise InputError(f"{_beside(path)} holds no conversation: it is not what /save or save() wrote")
        if talk["cache"] != _digest(path) or len(talk["tokens"]) != cache.get_seq_length():
            raise InputError(
                f"{_beside(path)} is not the conversation of {path}: they are written together, by /save or save()"
            )
        self.cache, self.messages, self.tokens = cache, talk["messages"], talk["tokens"]

    def _in_step(self) -> bool:
        """Whether the cache holds what `tokens` says; after a turn that failed it may hold more, or a part."""
        return not self.cache.broken and self.cache.get_seq_length() == len(self.tokens)

    def _empty(self) -> None:
        """Empty the cache; the next turn reads the whole conversation."""
        self.tokens = []  # first, so that an interrupt leaves them out of step
        self.cache.reset()


def generate_on(cache: ClusteredCache, model: CKVForCausalLM, encoded: Any, **options: Any) -> Tensor:
    """Generate after encoded text [1, S], which begins with what the cache has read; return all tokens [1, S + new]."""
    output: Tensor = model.generate(**encoded.to(model.device), past_key_values=cache, **options)
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


def _digest(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_talk(talk: Any) -> bool:
    """Whether this has the types of what `save` writes as JSON."""
    return (
        isinstance(talk, dict)
        and {name: type(value) for name, value in talk.items()} == {"cache": str, "messages": list, "tokens": list}
        and all(type(token) is int for token in talk["tokens"])
        and all(
            isinstance(each, dict) and {*each} == {"role", "content"} and {*map(type, each.values())} == {str}
            for each in talk["messages"]
        )
    )
