"""CKVConfig: what it refuses and why, what it resolves to, and its JSON form."""

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckv_compile.config import CKVConfig, layer_numbers
from ckv_compile.errors import CKVError, ConfigError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("budget", [0.0, 1.0, 1.5, -0.25, -3.0])
def test_a_float_budget_outside_zero_to_one_is_refused(budget: float) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"budget={budget!r}")) as caught:
        CKVConfig(budget=budget)
    assert "strictly between 0 and 1" in str(caught.value)
    assert "pass an int for a number of slots" in str(caught.value)


@pytest.mark.parametrize("name", ["budget", "r_init", "r_decay", "r_min"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, True, False, "512", None])
def test_what_is_no_finite_number_is_refused(name: str, value: object) -> None:
    options: dict[str, Any] = {"budget": 512, name: value}
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r} must be a finite number")):
        CKVConfig(**options)


@pytest.mark.parametrize(
    ("name", "least"),
    [("interval", 1), ("n_sink", 0), ("n_recent", 0), ("chunk_size", 2), ("max_batch_size", 1), ("max_context", 1)],
)
@pytest.mark.parametrize("value", ["too small", 2.0, 2.5, True, "2"])
def test_what_is_no_int_or_too_small_is_refused(name: str, least: int, value: object) -> None:
    value = least - 1 if value == "too small" else value
    options: dict[str, Any] = {"budget": 512, name: value}
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r} must be an int of at least {least}")):
        CKVConfig(**options)


@pytest.mark.parametrize("chunk_size", [3, 127])
def test_an_odd_chunk_size_is_refused(chunk_size: int) -> None:
    with pytest.raises(ConfigError, match=f"chunk_size={chunk_size} must be even"):
        CKVConfig(budget=512, chunk_size=chunk_size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r_init": 0.0, "r_min": 0.0}, "r_init=0.0 must lie in (0, 1]"),
        ({"r_init": -0.5}, "r_init=-0.5 must lie in (0, 1]"),
        ({"r_init": 1.01}, "r_init=1.01 must lie in (0, 1]"),
        ({"r_min": 0.0}, "r_min=0.0 must lie in (0, r_init=0.5]"),
        ({"r_min": -0.1}, "r_min=-0.1 must lie in (0, r_init=0.5]"),
        ({"r_init": 0.5, "r_min": 0.6}, "r_min=0.6 must lie in (0, r_init=0.5]"),
        ({"r_decay": -0.01}, "r_decay=-0.01 must be >= 0"),
    ],
)
def test_a_ratio_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        CKVConfig(budget=512, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"r_init": 1.0, "r_min": 1.0, "r_decay": 0},
        {"r_init": 1, "r_min": 1},
        {"n_sink": 0, "n_recent": 0},
        {"chunk_size": 2},
        {"budget": 0.999},
    ],
)
def test_the_edges_of_every_range_are_accepted(options: dict[str, Any]) -> None:
    CKVConfig(**{"budget": 512, **options})


@pytest.mark.parametrize("budget", [-5, 0, 1, 36, 37])
def test_a_budget_without_room_for_a_pair_is_refused_and_the_suggestion_works(budget: int) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"budget={budget} slots cannot hold n_sink=4 + n_recent=32")) as e:
        CKVConfig(budget=budget, interval=1)
    suggested = re.search(r"use at least (\d+)", str(e.value))
    assert suggested is not None
    assert CKVConfig(budget=int(suggested[1]), interval=1).capacity == 39


@pytest.mark.parametrize(("budget", "interval"), [(64, 200), (64, 30), (38, 5), (1024, 4096)])
def test_an_interval_larger_than_a_round_can_free_is_refused(budget: int, interval: int) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"interval={interval} is larger than the")) as caught:
        CKVConfig(budget=budget, interval=interval)
    assert "36 protected" in str(caught.value)
    assert "or a larger budget" in str(caught.value)


@given(
    spare=st.integers(2, 300),
    interval=st.integers(1, 400),
    n_sink=st.integers(0, 8),
    n_recent=st.integers(0, 64),
    half_chunk=st.integers(1, 80),
)
def test_one_round_frees_an_accepted_interval_and_a_suggested_one_is_accepted(
    spare: int, interval: int, n_sink: int, n_recent: int, half_chunk: int
) -> None:
    def config(steps: int) -> CKVConfig:
        return CKVConfig(
            budget=n_sink + n_recent + spare,
            interval=steps,
            n_sink=n_sink,
            n_recent=n_recent,
            chunk_size=2 * half_chunk,
        )

    try:
        accepted = config(interval)
    except ConfigError as error:
        suggested = re.search(r"use an interval of at most (\d+)", str(error))
        assert suggested is not None
        assert 1 <= int(suggested[1]) < interval
        accepted = config(int(suggested[1]))
    assert accepted.schedule.mergeable(accepted.capacity) >= accepted.interval


@pytest.mark.parametrize(
    "config",
    [
        CKVConfig(budget=512),
        CKVConfig(budget=0.25, max_context=8192),
        CKVConfig(
            budget=300,
            interval=7,
            n_sink=1,
            n_recent=2,
            chunk_size=16,
            r_init=0.5,
            r_decay=0.0,
            r_min=0.1,
            max_context=999,
            max_batch_size=3,
        ),
    ],
)
def test_json_brings_every_field_back(config: CKVConfig) -> None:
    again = CKVConfig.from_json(config.to_json())
    assert again == config
    assert type(again.budget) is type(config.budget)
    assert set(json.loads(config.to_json())) == {field.name for field in dataclasses.fields(CKVConfig)}


@pytest.mark.parametrize(
    ("name", "near"), [("budgets", "budget"), ("chunksize", "chunk_size"), ("n_sinks", "n_sink"), ("r_int", "r_init")]
)
def test_an_unknown_option_is_refused_with_the_nearest_name(name: str, near: str) -> None:
    options = {"budget": 512, name: 4}
    for build in (lambda: CKVConfig.from_options(options), lambda: CKVConfig.from_json(json.dumps(options))):
        with pytest.raises(ConfigError, match=f"unknown option '{name}': did you mean '{near}'") as caught:
            build()
        assert "max_batch_size" in str(caught.value), "all known options are named"


def test_an_unknown_option_like_no_other_is_refused_without_a_hint() -> None:
    with pytest.raises(ConfigError, match="unknown option 'zzz'") as caught:
        CKVConfig.from_options({"budget": 512, "zzz": 1})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "budget: 512", '{"budget": }'])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a JSON config"):
        CKVConfig.from_json(text)


@pytest.mark.parametrize(("text", "kind"), [("[512]", "list"), ("512", "int"), ("null", "NoneType")])
def test_json_that_is_no_object_is_refused(text: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"an object of fields, not {kind}"):
        CKVConfig.from_json(text)


def test_only_known_dtypes_are_taken_for_the_cache() -> None:
    assert CKVConfig(budget=100).cache_dtype == "auto"
    assert CKVConfig.from_json(CKVConfig(budget=100, cache_dtype="int8").to_json()).cache_dtype == "int8"
    with pytest.raises(ConfigError, match="cache_dtype='int4': choose one of 'auto', 'int8'"):
        CKVConfig(budget=100, cache_dtype="int4")


@pytest.mark.parametrize("text", ['{"budget": NaN}', '{"budget": true}', '{"budget": 512, "chunk_size": 7}'])
def test_a_bad_value_in_json_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        CKVConfig.from_json(text)


def test_a_missing_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget is missing"):
        CKVConfig.from_json('{"interval": 8}')


def test_an_error_is_a_value_error_and_one_of_ours() -> None:
    with pytest.raises(ValueError, match="budget") as caught:
        CKVConfig(budget=1.5)
    assert isinstance(caught.value, CKVError)


def test_a_config_is_frozen_and_takes_keywords_only() -> None:
    config = CKVConfig(budget=512)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.budget = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        CKVConfig(512)  # type: ignore[misc]
    assert hash(config) == hash(CKVConfig(budget=512))


def test_a_float_budget_resolves_to_a_fraction_of_the_models_context() -> None:
    resolved = CKVConfig(budget=0.25).resolve(8192)
    assert (resolved.budget, resolved.max_context) == (2048, 8192)
    assert isinstance(resolved.budget, int)
    assert resolved.capacity == 2048 + 64


def test_max_context_goes_before_the_models_context() -> None:
    assert CKVConfig(budget=0.5, max_context=1000).resolve(8192).budget == 500


def test_an_int_budget_resolves_to_itself_with_or_without_a_context() -> None:
    config = CKVConfig(budget=512, interval=32)
    assert config.resolve(None) == config.resolve(-1) == config
    assert config.resolve(4096) == dataclasses.replace(config, max_context=4096)


def test_a_float_budget_without_any_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings; pass max_context=, or an int budget"):
        CKVConfig(budget=0.25).resolve(None)


def test_a_float_budget_that_resolves_to_too_few_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="budget=25 slots cannot hold"):
        CKVConfig(budget=0.25).resolve(100)
    with pytest.raises(ConfigError, match="interval=64 is larger than the"):
        CKVConfig(budget=0.25).resolve(200)


def test_an_unresolved_float_budget_has_no_schedule() -> None:
    config = CKVConfig(budget=0.25)
    with pytest.raises(ConfigError, match="call resolve"):
        _ = config.schedule
    with pytest.raises(ConfigError, match="call resolve"):
        _ = config.capacity


def test_the_schedule_holds_the_integers_and_ratios_of_the_config() -> None:
    config = CKVConfig(budget=512, n_sink=2, n_recent=8, chunk_size=64, r_init=0.5, r_decay=0.1, r_min=0.2, exact=0.5)
    plan = dataclasses.asdict(config.schedule)
    assert plan.pop("n_exact") == (512 - 2 - 8) // 2
    assert plan.items() <= dataclasses.asdict(config).items()
    assert dataclasses.replace(config, exact=0.0).schedule.n_exact == 0


def test_exact_slots_leave_a_round_what_it_must_free() -> None:
    config = CKVConfig(budget=128, interval=64, n_sink=4, n_recent=32, exact=0.9)
    assert config.schedule.n_exact == 128 - 4 - 32 - 64
    assert config.schedule.mergeable(128 + 64) == 64


@given(
    layers=st.integers(2, 40),
    budget=st.integers(200, 4000),
    share=st.floats(0.5, 0.99),  # of 200 slots at least: enough for the protected ones and an interval
    count=st.integers(1, 39),
)
def test_light_layers_leave_their_slots_to_the_others(layers: int, budget: int, share: float, count: int) -> None:
    config = CKVConfig(budget=budget, light_layers=tuple(range(min(count, layers - 1))), light_share=share)
    main, light = config.plans(layers)
    slots = [(light if layer in config.light_layers else main).schedule.budget for layer in range(layers)]
    assert budget * layers - layers < sum(slots) <= budget * layers
    assert light.schedule.budget == round(share * budget) < main.schedule.budget
    assert {plan.capacity - plan.schedule.budget for plan in (main, light)} == {config.interval}


def test_without_light_layers_there_is_one_group() -> None:
    main, light = CKVConfig(budget=512).plans(30)
    assert (main.schedule, main.capacity, light.capacity) == (CKVConfig(budget=512).schedule, 576, 0)


@pytest.mark.parametrize(
    ("light", "message"),
    [
        ("0-4", r"light_layers='0-4' must be a list of layer numbers"),
        ([1.5], r"a layer number=1.5 must be an int of at least 0"),
        ([-1], r"a layer number=-1 must be an int of at least 0"),
        ([0, 1, 2], r"they are 3, and the model has 3 layers"),
    ],
    ids=repr,
)
def test_bad_light_layers_are_refused(light: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CKVConfig(budget=512, light_layers=light).plans(3)


def test_light_layers_are_one_config_however_they_are_written() -> None:
    config = CKVConfig(budget=512, light_layers=[3, 1, 1])
    assert config == CKVConfig(budget=512, light_layers=(1, 3)) == CKVConfig.from_json(config.to_json())


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, True, "half"], ids=repr)
def test_a_bad_light_share_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match="light_share="):
        CKVConfig(budget=512, light_share=share)


@pytest.mark.parametrize(
    ("text", "layers"),
    [("0-4,10", (0, 1, 2, 3, 4, 10)), ("3", (3,)), ("1+5-6", (1, 5, 6))],
    ids=lambda value: str(value),
)
def test_layers_are_read_from_text(text: str, layers: tuple[int, ...]) -> None:
    assert layer_numbers(text) == layers


def test_light_layers_too_small_for_what_is_protected_are_refused_by_their_own_size() -> None:
    with pytest.raises(ConfigError, match=r"the 35 slots of a light layer \(light_share=0.35 of 100\) cannot hold"):
        CKVConfig(budget=100, light_layers=[0])
    with pytest.raises(
        ConfigError, match=r"the 90 slots of a light layer \(light_share=0.35 of 256\) \+ interval = 154"
    ):
        CKVConfig(budget=256, light_layers=[0])
    assert CKVConfig(budget=100).light_layers == ()


@pytest.mark.parametrize("text", ["", "a", "1-", "-3", "1,,2", "5-3"], ids=repr)
def test_what_is_no_layers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no number or range|ends before it begins"):
        layer_numbers(text)


@pytest.mark.parametrize("exact", [-0.1, 1.0, 2, float("nan"), True, "half"], ids=repr)
def test_a_bad_share_of_exact_slots_is_refused(exact: object) -> None:
    with pytest.raises(ConfigError, match="exact="):
        CKVConfig(budget=128, exact=exact)
