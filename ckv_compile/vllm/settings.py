"""What a vLLM engine asks of the plugin, and what of it the plugin cannot serve."""

from typing import Any, NamedTuple

import torch
import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionType

from ckv_compile.cache import CacheShape
from ckv_compile.config import CKVConfig
from ckv_compile.errors import ConfigError, UnsupportedModelError
from ckv_compile.ops import check_kernels

KEY = "ckv"
"""The key of `additional_config` whose value is a `CKVConfig`."""
SUPPORTED = SpecifierSet(">=0.32,<0.33")
"""Releases of vLLM whose interfaces the plugin was written for."""
_OF_VLLM = {
    "prefill_chunk": "vLLM takes as many tokens of a prompt in a step as max_num_batched_tokens says",
    "max_batch_size": "vLLM runs as many requests at once as max_num_seqs says",
}
"""Options of `CKVConfig` that vLLM has others for."""


class Layer(NamedTuple):
    """What a model asks of its attention in one layer, as vLLM hands it to an implementation."""

    head_size: int
    kv_heads: int
    kv_cache_dtype: str
    alibi_slopes: list[float] | None
    sliding_window: int | None
    attention_type: AttentionType
    shared_with: str | None  # the layer whose keys and values it attends to
    others: dict[str, Any]  # arguments that only some models pass


def config_of(engine: VllmConfig) -> CKVConfig | None:
    """The configuration that an engine asks for, resolved for its longest request; None if it asks for none.

    Raises:
        ConfigError: for an unknown name or a bad value, or an option that is vLLM's own here.
    """
    extra = engine.additional_config
    options = extra.get(KEY) if isinstance(extra, dict) else None
    if options is None:
        return None
    if not isinstance(options, dict):
        raise ConfigError(
            f'additional_config has {KEY!r}: {options!r}; pass an object of options, as {{"budget": 1024}}'
        )
    for name, instead in _OF_VLLM.items():
        if name in options:
            raise ConfigError(f"{name}={options[name]!r} is not an option here: {instead}")
    return CKVConfig.from_options(options).resolve(engine.model_config.max_model_len)


def check(engine: VllmConfig, config: CKVConfig, layer: Layer) -> None:
    """Refuse what the plugin cannot serve.

    Raises:
        UnsupportedModelError: with all reasons, and what to change for each.
    """
    reasons = [*_of_engine(engine, config), *_of_layer(engine, config, layer)]
    if reasons:
        listed = "\n".join(f"  - {reason}" for reason in reasons)
        raise UnsupportedModelError(
            f"ckv_compile cannot serve this under vLLM {vllm.__version__}:\n{listed}\n"
            f"or take {KEY!r} out of additional_config to serve it without clustering"
        )


def _of_engine(engine: VllmConfig, config: CKVConfig) -> list[str]:
    model, parallel = engine.model_config, engine.parallel_config
    found = [
        (
            Version(vllm.__version__).base_version not in SUPPORTED,
            f"vLLM {vllm.__version__}: install vllm{SUPPORTED}",
        ),
        (
            engine.speculative_config is not None,
            "speculative decoding, since a rejected token cannot be taken out of a state: leave out speculative_config",
        ),
        (
            engine.kv_transfer_config is not None,
            "a KV connector or offloading, which moves pages of tokens: leave out kv_transfer_config and "
            "kv_offloading_size",
        ),
        (
            parallel.decode_context_parallel_size > 1,
            f"decode_context_parallel_size={parallel.decode_context_parallel_size}, which splits the tokens of a "
            "request: set it to 1",
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            f"prefill_context_parallel_size={parallel.prefill_context_parallel_size}, which splits a prompt: set it "
            "to 1",
        ),
        (
            bool(config.light_layers) and parallel.pipeline_parallel_size > 1,
            f"light_layers={list(config.light_layers)}, which are counted over all layers, with pipeline_parallel_size="
            f"{parallel.pipeline_parallel_size}: leave out one of them",
        ),
        (parallel.use_ubatching, "two batches that overlap: leave out enable_dbo and ubatch_size"),
        (
            model.is_hybrid,
            f"{model.architecture}, with layers that keep another state than keys and values: serve a model of "
            "attention layers alone",
        ),
        (model.is_encoder_decoder, f"{model.architecture}, an encoder-decoder: serve a decoder"),
    ]
    return [reason for holds, reason in found if holds]


def _of_layer(engine: VllmConfig, config: CKVConfig, layer: Layer) -> list[str]:
    dtype = engine.model_config.dtype
    window = layer.sliding_window or engine.model_config.get_sliding_window()
    others = [name for name, value in layer.others.items() if value is not None and value is not False]
    found = [
        (
            bool(window),
            f"a sliding window of {window} tokens: serve a model without one, or pass disable_sliding_window",
        ),
        (
            layer.alibi_slopes is not None,
            "ALiBi, a bias by distance, which merged tokens do not have: serve a model with rotary positions",
        ),
        (
            layer.attention_type != AttentionType.DECODER,
            f"attention of the kind {layer.attention_type.value!r}: serve a decoder",
        ),
        (
            layer.shared_with is not None,
            f"a layer that attends to the keys and values of {layer.shared_with}: serve a model without such layers",
        ),
        (
            layer.kv_cache_dtype not in ("auto", str(dtype).removeprefix("torch.")),
            f"kv_cache_dtype={layer.kv_cache_dtype!r} beside weights of {dtype}: set it to auto",
        ),
        (bool(others), f"attention with {', '.join(others)}: serve a model without"),
    ]
    reasons = [reason for holds, reason in found if holds]
    device = torch.device(engine.device_config.device_type)
    shape = CacheShape(1, layer.kv_heads, 1, layer.head_size, dtype, device)  # any number of query heads is served
    try:
        check_kernels(shape, config.schedule)
    except ConfigError as error:
        reasons.append(str(error))
    return reasons
