"""The one configuration object."""

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ckv_compile.errors import ConfigError
from ckv_compile.schedule import GroupPlan, Plans, Schedule

CacheDtype = Literal["auto", "int8"]
"""Of keys and values in the cache: the model's, or 8 bits a number."""


@dataclass(frozen=True, kw_only=True)
class CKVConfig:
    """How a clustered KV cache is sized and compacted.

    The defaults keep most slots exact (`exact=0.9`) and merge all other tokens in rounds that each take up to half of
    set A (`r_init=0.5`): a prompt is compressed by a dozen of them. A compaction in decode is one round that merges
    `interval` slots, whatever r_* say.

    Args:
        budget: cache slots per KV head after compaction. An int counts slots; a float strictly between 0
            and 1 is the *kept* fraction of `max_context`.
        interval: decode steps between compactions (g in the paper). The cache holds budget + interval slots.
        n_sink: first slots that are never merged.
        n_recent: last slots that are never merged.
        exact: share of the other slots that hold the tokens worth most, unmerged: those whose key and value are unlike
            the others', and those that recent queries expect to attend to, or do. They are chosen anew in every
            compaction. They are fewer where a round could not free `interval` slots otherwise. 0.0 is the paper's
            method.
        light_layers: layers of the model, by number, that get fewer slots than the budget, so that all others get more;
            the budget is the mean over all layers without a sliding window. Layers differ much in what they lose by a
            small cache: `ckv calibrate` measures which lose least. Empty: all layers have the same budget.
        light_share: slots of a light layer, as a share of the budget, in (0, 1).
        chunk_size: slots per matching chunk (c in the paper); even.
        r_init: share of set A that the first round merges, in (0, 1].
        r_decay: fall of that share from round to round, >= 0.
        r_min: floor of the share, in (0, r_init].
        max_context: longest context to serve; None takes the model's `max_position_embeddings`. A float budget is a
            fraction of it, rotary frequencies that change with the context (longrope) are those of it, and a larger
            one than the model's makes rings of windows that never close in the model's own. It does not limit
            generation.
        max_batch_size: most rows that one call may hold. Memory is taken per row in use.
        prefill_chunk: tokens of a prompt or turn that are processed at once. None takes all of them: exact attention
            over the whole prompt, whose memory grows with it. A number bounds memory for any length; each chunk then
            attends to the clustered cache of those before it.
        cache_dtype: of cached keys and values. "auto" is the model's; "int8" rounds each of them to whole numbers times
            a step of its own, which takes about half of the bytes of bfloat16. Sliding windows stay as they are.

    Raises:
        ConfigError: for a value out of range, or a combination that no plan can satisfy.
    """

    budget: int | float
    interval: int = 64
    n_sink: int = 4
    n_recent: int = 32
    exact: float = 0.9
    light_layers: Sequence[int] = ()
    light_share: float = 0.35
    chunk_size: int = 128
    r_init: float = 0.5
    r_decay: float = 0.01
    r_min: float = 0.05
    max_context: int | None = None
    max_batch_size: int = 8
    prefill_chunk: int | None = None
    cache_dtype: CacheDtype = "auto"

    def __post_init__(self) -> None:
        _check_number("budget", self.budget)
        if isinstance(self.budget, float) and not 0.0 < self.budget < 1.0:
            raise ConfigError(
                f"budget={self.budget!r}: a float budget is a fraction of max_context and must lie strictly between "
                "0 and 1; pass an int for a number of slots (to keep everything, an int of the longest context)"
            )
        for name, least in (("interval", 1), ("n_sink", 0), ("n_recent", 0), ("chunk_size", 2), ("max_batch_size", 1)):
            _check_int(name, getattr(self, name), least)
        for name in ("max_context", "prefill_chunk"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        if self.cache_dtype not in get_args(CacheDtype):
            raise ConfigError(
                f"cache_dtype={self.cache_dtype!r}: choose one of {', '.join(map(repr, get_args(CacheDtype)))}"
            )
        if self.chunk_size % 2:
            raise ConfigError(
                f"chunk_size={self.chunk_size} must be even: a chunk is split alternately into two equal sets"
            )
        for name in ("r_init", "r_decay", "r_min", "exact", "light_share"):
            _check_number(name, getattr(self, name))
        if not 0.0 <= self.exact < 1.0:
            raise ConfigError(
                f"exact={self.exact!r} must lie in [0, 1): the share of the slots that hold single tokens; centroids "
                "need the rest"
            )
        if not 0.0 < self.light_share < 1.0:
            raise ConfigError(
                f"light_share={self.light_share!r} must lie strictly between 0 and 1: the slots of a light layer, as a "
                "share of the budget"
            )
        self._check_light_layers()
        if not 0.0 < self.r_init <= 1.0:
            raise ConfigError(f"r_init={self.r_init!r} must lie in (0, 1]: the share of set A that a round merges")
        if not 0.0 < self.r_min <= self.r_init:
            raise ConfigError(f"r_min={self.r_min!r} must lie in (0, r_init={self.r_init!r}]")
        if self.r_decay < 0.0:
            raise ConfigError(f"r_decay={self.r_decay!r} must be >= 0: the share of merges falls from round to round")
        if not isinstance(self.budget, float):
            self._check_plan(self.budget, f"budget={self.budget} slots")
            if self.light_layers:
                self._light_budget(self.budget)

    def resolve(self, max_position_embeddings: int | None) -> "CKVConfig":
        """Return this config with `max_context` filled in and `budget` as an int number of slots.

        Raises:
            ConfigError: if a float budget has no context to be a fraction of, or gives too few slots.
        """
        max_context = self.max_context
        if max_context is None and (max_position_embeddings or 0) > 0:  # -1 where there is no end
            max_context = max_position_embeddings
        budget = self.budget
        if isinstance(budget, float):
            if max_context is None:
                raise ConfigError(
                    f"budget={budget!r} is a fraction of max_context, but the model's config has no "
                    "max_position_embeddings; pass max_context=, or an int budget"
                )
            budget = round(budget * max_context)
        return dataclasses.replace(self, budget=budget, max_context=max_context)

    @property
    def capacity(self) -> int:
        """Slots per KV head that are allocated, in the mean over layers: budget + interval (needs an int budget)."""
        return self.schedule.budget + self.interval

    @property
    def schedule(self) -> Schedule:
        """The compaction plan of a resolved config, for layers that all have the budget.

        Raises:
            ConfigError: if the budget is still a float.
        """
        if isinstance(self.budget, float):
            raise ConfigError(f"budget={self.budget!r} is a fraction; call resolve(max_position_embeddings) first")
        return self._schedule(self.budget)

    def plans(self, layers: int) -> Plans:
        """The compaction plans of a resolved config for a model of so many layers without a sliding window.

        Together the layers have no more slots than if each had the budget.

        Raises:
            ConfigError: if the budget is still a float, if every layer is light, or a budget is too small.
        """
        even, light = self.schedule, len(self.light_layers)
        if not light:
            return Plans(GroupPlan(even, self.capacity), GroupPlan(even, 0))
        if light >= layers:
            raise ConfigError(
                f"light_layers={list(self.light_layers)}: they are {light}, and the model has {layers} layers without "
                "a sliding window; leave some that can have more slots"
            )
        least = self._light_budget(even.budget)
        budgets = ((even.budget * layers - least * light) // (layers - light), least)
        return Plans(*(GroupPlan(self._schedule(budget), budget + self.interval) for budget in budgets))

    def _check_light_layers(self) -> None:
        given = self.light_layers
        if not isinstance(given, list | tuple):
            raise ConfigError(f"light_layers={given!r} must be a list of layer numbers, as in [0, 1, 2]")
        for layer in given:
            _check_int("light_layers: a layer number", layer, 0)
        object.__setattr__(self, "light_layers", tuple(sorted(set(given))))  # one config, however it is written

    def _schedule(self, budget: int) -> Schedule:
        unprotected = budget - self.n_sink - self.n_recent
        return Schedule(
            budget=budget,
            n_sink=self.n_sink,
            n_recent=self.n_recent,
            chunk_size=self.chunk_size,
            r_init=self.r_init,
            r_decay=self.r_decay,
            r_min=self.r_min,
            n_exact=max(0, min(int(self.exact * unprotected), unprotected - self.interval)),
        )

    def _light_budget(self, budget: int) -> int:
        """Slots of a light layer."""
        least = round(self.light_share * budget)
        self._check_plan(least, f"the {least} slots of a light layer (light_share={self.light_share} of {budget})")
        return least

    def _check_plan(self, budget: int, name: str) -> None:
        protected = self.n_sink + self.n_recent
        if budget < protected + 2:
            raise ConfigError(
                f"{name} cannot hold n_sink={self.n_sink} + n_recent={self.n_recent} protected slots "
                f"and a pair to merge: use at least {protected + 2}, or protect fewer"
            )
        mergeable = self._schedule(budget).mergeable(budget + self.interval)
        if self.interval > mergeable:
            raise ConfigError(
                f"interval={self.interval} is larger than the {mergeable} slots that one round can free from {name} + "
                f"interval = {budget + self.interval}, with {protected} protected: use an interval of at most "
                f"{budget - protected}, or a larger budget"
            )

    def to_json(self) -> str:
        """Return the config as a JSON object with every field."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "CKVConfig":
        """Read what `to_json` wrote.

        Raises:
            ConfigError: if the text is no JSON object, or holds an unknown key or a bad value.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"not a JSON config: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"a JSON config is an object of fields, not {type(data).__name__}")
        return cls.from_options(data)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "CKVConfig":
        """Build a config from keyword options, refusing names that it does not have.

        Raises:
            ConfigError: for an unknown name (with the nearest known one), a missing budget or a bad value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ConfigError(f"unknown option {name!r}: {hint}known options are {', '.join(known)}")
        if "budget" not in options:
            raise ConfigError("budget is missing: pass the slots to keep per KV head (int) or a fraction (float)")
        return cls(**options)


def layer_numbers(text: str) -> tuple[int, ...]:
    """Read layers as they are written in a command: numbers and ranges, joined by commas or plus signs, as in 0-4,10.

    Raises:
        ConfigError: if a part is neither.
    """
    found: list[int] = []
    for part in text.replace("+", ",").split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"layers {text!r}: {part!r} is no number or range; write them as in 0-4,10,12")
        end = int(last if dash else first)
        if end < int(first):
            raise ConfigError(f"layers {text!r}: {part!r} ends before it begins")
        found += range(int(first), end + 1)
    return tuple(found)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise ConfigError(f"{name}={value!r} must be a finite number")


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} must be an int of at least {least}")


def _is_finite(value: int | float) -> bool:
    return isinstance(value, int) or math.isfinite(value)  # an int may be too large for isfinite
