"""Long texts that ship with CPython, by name, and windows of them.

There are two kinds, prose and code, and of each one text for choosing options and another for reporting what they are
worth: nothing of the second was looked at when defaults were chosen.
"""

import importlib.util
import pydoc_data.topics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ckv_compile.errors import InputError

_TUNING = ("argparse", "inspect", "ast", "datetime")
_REPORTING = ("typing", "tarfile", "turtle", "doctest")


def _topics(start: int) -> list[str]:
    """The paragraphs of every other topic of the language reference, by their names."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics)[start::2]).split("\n\n")


def _other_topics() -> list[str]:
    """Those of the other topics; some paragraphs stand in several."""
    known = {*_topics(0)}
    return [paragraph for paragraph in _topics(1) if paragraph not in known]


def _sources(modules: Sequence[str]) -> str:
    found = [importlib.util.find_spec(module) for module in modules]
    return "\n".join(Path(spec.origin).read_text(encoding="utf-8") for spec in found if spec and spec.origin)


TEXTS: dict[str, Callable[[], str]] = {
    "reference-tuning": lambda: "\n\n".join(_topics(0)),
    "reference-reporting": lambda: "\n\n".join(_other_topics()),
    "sources-tuning": lambda: _sources(_TUNING),
    "sources-reporting": lambda: _sources(_REPORTING),
}
"""The texts, by name: topics of the language reference, and sources of modules."""


def windows(tokenizer: Any, name: str, text: str, length: int, count: int) -> list[Tensor]:
    """Cut windows [1, length] int64 out of a text, at equal distances from its beginning to its end.

    Raises:
        InputError: if they would overlap.
    """
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids
    tokens = ids.shape[1]
    if count * length > tokens:
        raise InputError(
            f"{name}: {count} windows of {length:,} tokens in a text of {tokens:,}: there is room for "
            f"{tokens // length}; ask for fewer, or shorter ones"
        )
    distance = (tokens - length) // max(1, count - 1)
    return [ids[:, i * distance : i * distance + length] for i in range(count)]
