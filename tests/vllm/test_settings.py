"""What the plugin is asked for, and what it refuses."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from conftest import VOCABULARY, tiny_model
from engines import engine, generate, greedy, random_prompts
from transformers import DeepseekV2Config
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import AttentionType

from ckv_compile.config import CKVConfig
from ckv_compile.errors import ConfigError, UnsupportedModelError
from ckv_compile.vllm import settings
from ckv_compile.vllm.settings import Layer

PLAIN = Layer(32, 2, "auto", None, None, AttentionType.DECODER, None, {})
SMALL = {"budget": 64, "interval": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", head_dim=32, num_key_value_heads=2).save_pretrained(path)
    return str(path)


def asking(folder: str, ckv: Any) -> VllmConfig:
    extra = {"additional_config": {"ckv": ckv}}
    arguments = EngineArgs(folder, skip_tokenizer_init=True, dtype="float32", max_model_len=256, **extra)
    return arguments.create_engine_config()


def test_the_options_are_those_of_the_config(folder: str) -> None:
    assert settings.config_of(asking(folder, SMALL)) == CKVConfig(budget=64, interval=16, max_context=256)
    assert settings.config_of(asking(folder, {"budget": 0.5})).budget == 128, "half of the longest request"
    assert settings.config_of(EngineArgs(folder, skip_tokenizer_init=True).create_engine_config()) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgte": 64}, "did you mean 'budget'"),
        ({"budget": 64, "r_init": 2}, r"r_init=2 must lie in \(0, 1\]"),
        ({}, "budget is missing"),
        (64, "pass an object of options"),
        ({"budget": 64, "prefill_chunk": 8}, "prefill_chunk=8 is not an option here.*max_num_batched_tokens"),
        ({"budget": 64, "max_batch_size": 8}, "max_batch_size=8 is not an option here.*max_num_seqs"),
    ],
    ids=["unknown", "range", "none", "number", "chunks", "batch"],
)
def test_bad_options_are_refused(folder: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.config_of(asking(folder, options))


def reasons(config: VllmConfig, layer: Layer = PLAIN) -> list[str]:
    asked = settings.config_of(config)
    assert asked is not None
    try:
        settings.check(config, asked, layer)
    except UnsupportedModelError as error:
        first, *listed, last = str(error).split("\n")
        assert "cannot serve this under vLLM" in first
        assert "take 'ckv' out of additional_config" in last
        assert all(reason.startswith("  - ") for reason in listed)
        return [reason[4:] for reason in listed]
    return []


def test_a_plain_decoder_is_served(folder: str) -> None:
    assert reasons(asking(folder, SMALL)) == []
    assert reasons(asking(folder, SMALL), PLAIN._replace(others={"use_alibi_sqrt": False, "indexer": None})) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alibi_slopes": [0.5]}, "ALiBi.*rotary positions"),
        ({"sliding_window": 64}, "sliding window of 64 tokens.*disable_sliding_window"),
        ({"attention_type": AttentionType.ENCODER_ONLY}, "'encoder_only': serve a decoder"),
        ({"shared_with": "model.layers.0"}, "keys and values of model.layers.0"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' beside weights of torch.float32: set it to auto"),
        ({"others": {"chunk_lookback": 3}}, "attention with chunk_lookback"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_layer_asks_for_and_is_not_served(folder: str, change: dict[str, Any], message: str) -> None:
    (reason,) = reasons(asking(folder, SMALL), PLAIN._replace(**change))
    assert re.search(message, reason)


def test_all_reasons_are_in_one_error(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = asking(folder, SMALL | {"budget": 160, "light_layers": [0, 2]})
    config.speculative_config = config.kv_transfer_config = SimpleNamespace()
    config.parallel_config.decode_context_parallel_size = 2
    config.parallel_config.prefill_context_parallel_size = 2
    config.parallel_config.pipeline_parallel_size = 2
    config.parallel_config.ubatch_size = 2
    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    found = reasons(config, PLAIN._replace(sliding_window=64, alibi_slopes=[0.5]))
    starts = [
        "vLLM 0.33.0: install vllm",
        "speculative decoding",
        "a KV connector",
        "decode_context",
        "prefill_context",
    ]
    starts += [
        "light_layers=[0, 2], which are counted over all layers",
        "two batches that overlap",
        "a sliding window",
        "ALiBi",
    ]
    assert len(found) == len(starts)
    assert all(reason.startswith(start) for reason, start in zip(found, starts, strict=True)), found


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0"])
def test_other_releases_of_vllm_are_refused(folder: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    assert reasons(asking(folder, SMALL)) == [f"vLLM {version}: install vllm<0.33,>=0.32"]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.4+cpu", "0.32.1rc2"])
def test_these_are_not(folder: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    assert reasons(asking(folder, SMALL)) == []


def test_an_engine_does_not_start_with_what_is_refused(tmp_path: Path) -> None:
    """A model with a sliding window, and a quantised cache: both are in the error; without them it starts."""
    model = tiny_model("mistral", head_dim=32, sliding_window=64)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"sliding window of 64(.|\n)*kv_cache_dtype='fp8'"):
        engine(str(tmp_path), SMALL, max_model_len=256, kv_cache_dtype="fp8")
    llm = engine(str(tmp_path), SMALL, disable_sliding_window=True, max_model_len=64)
    prompt = random_prompts(20, vocabulary=VOCABULARY)
    assert len(generate(llm, prompt, greedy(10))[0]) == 10


def test_latent_attention_is_refused_and_not_served_without_clustering(tmp_path: Path) -> None:
    shape = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": None, "kv_lora_rank": 512}
    dims = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 256}
    experts = {"n_routed_experts": 4, "first_k_dense_replace": 1}
    config = DeepseekV2Config(**shape, **heads, **dims, **experts, architectures=["DeepseekV2ForCausalLM"])
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"DeepseekV2ForCausalLM has latent attention.*take 'ckv' out"):
        engine(str(tmp_path), SMALL, max_model_len=256, load_format="dummy")
