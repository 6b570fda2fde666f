"""The arithmetic of what fits, against caches and models that are really there."""

import pytest
import torch
from conftest import cache_of, tiny_model
from transformers import AutoModelForCausalLM, BioGptConfig, DeepseekV2Config, DiffLlamaConfig, MambaConfig

import ckv_compile
from ckv_compile.benchmark import cache_bytes
from ckv_compile.errors import UnsupportedModelError
from ckv_compile.plan import Plan, measure, row_bytes

CONTEXT, INTERVAL = 512, 8


@pytest.mark.parametrize("family", ["llama", "smollm2", "mistral", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_config_tells_what_a_model_and_its_own_cache_take(family, dtype, prompt):
    model = AutoModelForCausalLM.from_config(tiny_model(family).config, dtype=dtype)
    footprint = measure(model.config, dtype)
    assert footprint.weights == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    for length in (10, 300):  # within windows, and beyond
        with torch.no_grad():
            cache = cache_of(model(prompt(length), use_cache=True))
        assert Plan(None).row_bytes(footprint, length) == cache_bytes(cache)


@pytest.mark.parametrize(
    ("family", "changes", "budget"),
    [("llama", {}, 0.25), ("mistral", {"sliding_window": 20}, 64), ("gemma3", {}, 100)],
    ids=["llama, a share", "mistral, windows only", "gemma3, some windows"],
)
def test_a_config_tells_what_a_clustered_cache_takes(family, changes, budget):
    model = tiny_model(family, **changes)
    ours = ckv_compile.transform(model, budget=budget, interval=INTERVAL, max_context=CONTEXT, compile="eager")
    planned = Plan(budget, INTERVAL).row_bytes(measure(model.config, torch.float32), CONTEXT)
    assert planned == row_bytes(ours.cache_shape, ours.ckv_config.capacity) == ours.new_cache().nbytes()
    assert 3 * planned == ours.new_cache(3).nbytes()
    shape = ours.cache_shape._replace(int8=True)
    planned = Plan(budget, INTERVAL, cache_dtype="int8").row_bytes(measure(model.config, torch.float32), CONTEXT)
    assert planned == row_bytes(shape, ours.ckv_config.capacity)


def test_a_window_as_long_as_the_context_is_none():
    config = tiny_model("mistral", sliding_window=600).config
    footprint = measure(config, torch.float32)
    assert (footprint.shape(256).layers, footprint.shape(256).window_layers) == (3, 0)
    assert (footprint.shape(601).layers, footprint.shape(601).window_layers) == (0, 3)


@pytest.mark.parametrize("budget", [None, 0.5, 0.25, 300], ids=["full", "half", "quarter", "slots"])
@pytest.mark.parametrize("chunk", [None, 64], ids=["at once", "chunks"])
def test_what_fits_fits_and_one_more_does_not(budget, chunk):
    footprint = measure(tiny_model().config, torch.float32)
    plan, memory = Plan(budget, INTERVAL, chunk), 3_000_000
    for context in (128, 1000):
        rows = plan.largest_batch(footprint, memory, context)
        assert plan.needed(footprint, context, rows) <= memory < plan.needed(footprint, context, rows + 1)
    longest = plan.longest_context(footprint, memory, 2)
    if budget == 300 and chunk:
        assert longest is None
    else:
        assert plan.needed(footprint, longest, 2) <= memory < plan.needed(footprint, longest + 1, 2)
    assert plan.largest_batch(footprint, footprint.weights // 2, 128) == 0
    assert plan.longest_context(footprint, footprint.weights // 2, 1) == 0


SMALL = {"vocab_size": 128, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "pad_token_id": None}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BioGptConfig(**SMALL, intermediate_size=96), "does not run without its weights"),
        (DeepseekV2Config(**SMALL, num_key_value_heads=6, intermediate_size=96, first_k_dense_replace=2), "latent"),
        (DiffLlamaConfig(**SMALL, num_key_value_heads=2, head_dim=8, intermediate_size=96), "attend to them twice"),
        (MambaConfig(vocab_size=128, hidden_size=48, num_hidden_layers=2), "only caches of keys and values"),
    ],
    ids=["looks at numbers", "latent attention", "two attentions a layer", "recurrent"],
)
def test_what_a_config_does_not_tell_is_refused(config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        measure(config, torch.float32).shape(CONTEXT)
