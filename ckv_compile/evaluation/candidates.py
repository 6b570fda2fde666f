"""What stands in a row of a table: a method with its options, written as `ours:r_init=0.1,chunk_size=64`."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ckv_compile.config import CKVConfig, layer_numbers
from ckv_compile.errors import ConfigError
from ckv_compile.evaluation.ablations import VARIANTS
from ckv_compile.evaluation.methods import FULL, METHODS, OURS, Method
from ckv_compile.schedule import Schedule

KNOWN: dict[str, Method] = METHODS | VARIANTS
"""Every method by its name, the variants of chunked soft matching among them."""
_SHARED = ("n_sink", "n_recent", "light_layers", "light_share")
OPTIONS = (*_SHARED, "exact", "chunk_size", "r_init", "r_decay", "r_min", "max_context")
"""Fields of `CKVConfig` that a whole run may have; the others say how the product reads, and not what it keeps."""


class Candidate(NamedTuple):
    """A method with the options that it alone has."""

    label: str
    method: str
    options: Mapping[str, Any]  # fields of CKVConfig


class Compression(NamedTuple):
    """A candidate at a budget."""

    candidate: Candidate
    config: CKVConfig  # resolved

    def plans(self, tokens: int, layers: int) -> tuple[Schedule, Schedule]:
        """How a prompt of so many tokens is compressed in a model of so many clustered layers, and in light ones.

        A budget of all tokens leaves them as they are.
        """
        main, light = (
            dataclasses.replace(schedule, budget=schedule.settle(tokens, capacity))
            for schedule, capacity in self.config.plans(layers)
        )
        if self.candidate.method == FULL:
            main = light = dataclasses.replace(main, budget=tokens)
        return main, light


def candidate(label: str) -> Candidate:
    """Read `METHOD` or `METHOD:FIELD=VALUE,...`.

    Fields are those of `CKVConfig` that say how a cache is compacted; light layers are written as 0-4+10. Methods that
    are not of the product protect `n_sink` and `n_recent` tokens, may have light layers, and have no other options. An
    `interval` makes the product compact again while a text is predicted; without one only the prompt is compressed.

    Raises:
        ConfigError: for a method or a field that there is not.
    """
    method, _, rest = label.partition(":")
    if method not in KNOWN:
        raise ConfigError(f"method {method!r}: choose among {', '.join(KNOWN)}")
    allowed = _fields(method)
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in allowed:
            raise ConfigError(f"{label!r}: {method} has no option {name!r}; it has {', '.join(allowed) or 'none'}")
        if name == "light_layers":
            options[name] = layer_numbers(value)
            continue
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value  # which CKVConfig judges
    return Candidate(label, method, options)


def compression(chosen: Candidate, slots: int, options: Mapping[str, Any]) -> Compression:
    """A candidate that keeps so many slots, with the options of the whole run.

    Raises:
        ConfigError: for an option or a budget that the product refuses.
    """
    for name in options:
        if name not in OPTIONS:
            raise ConfigError(
                f"{name}={options[name]!r}: methods are compared after one exact prefill, with the options "
                f"{', '.join(OPTIONS)}; an interval is one of the product alone, as in {OURS}:interval=64"
            )
    return Compression(
        chosen, CKVConfig.from_options({"interval": 1} | dict(options) | dict(chosen.options) | {"budget": slots})
    )


def _fields(method: str) -> Sequence[str]:
    if method == FULL:
        return ()
    if method == OURS or method in VARIANTS:
        return [*OPTIONS[:-1], *(["interval"] if method == OURS else [])]
    return _SHARED
