"""Tiny random models of each family, and the real one."""

import os
from collections.abc import Callable

import pytest
import torch
from ckv_compile.passes.canonicalize_attention import canonicalize_attention
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from ckv_compile.capture import capture
from ckv_compile.ops import attention
from ckv_compile.reference import CacheRows

VOCABULARY = 128
# A kernel that does not build must fail the tests, not skip them.
needs_kernel = pytest.mark.skipif(os.environ.get("CKV_CPU_KERNEL") == "0", reason="CKV_CPU_KERNEL=0")
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, object]]] = {
    "llama": (LlamaConfig, {}),
    "llama-mha-bias": (LlamaConfig, {"num_key_value_heads": 6, "attention_bias": True, "head_dim": 8}),
    "smollm2": (LlamaConfig, {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 100000.0}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 24}),
    "qwen2": (Qwen2Config, {"num_key_value_heads": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "gemma2": (Gemma2Config, {"head_dim": 16, "sliding_window": 20}),  # score caps; windows in layers 0 and 2
    "gpt-oss": (GptOssConfig, {"head_dim": 8, "sliding_window": 20, "num_local_experts": 4}),  # learned sinks; likewise
    "gemma3": (
        Gemma3TextConfig,
        {
            "head_dim": 16,
            "sliding_window": 20,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding")],
        },
    ),
}


def tiny_model(family: str = "llama", **changes: object) -> PreTrainedModel:
    """A random model of a family: 3 layers, 6 query and 3 KV heads unless the family says otherwise."""
    config_class, own = FAMILIES[family]
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,  # large enough that tokens differ in what they attend to
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_class(**(shape | own | changes))).eval()


@pytest.fixture
def prompt() -> Callable[..., torch.Tensor]:
    """Random token ids [batch, length], the same for the same arguments."""

    def make(length: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))

    return make


def cache_of(output):
    """The cache in an output of transformers, by either of its names."""
    return output.get("cache", output.get("past_key_values"))


def reference_logits(model, config, ids, steps, prefill_chunk=None):
    """Greedy decoding by the reference ops alone: the captured model, its attention interpreted by `CacheRows`."""
    graph = capture(model)
    canonicalize_attention(graph)
    graph.recompile()
    windows = [node.args[7] for node in graph.graph.find_nodes(op="call_function", target=attention)]
    clustered = [number for number, window in enumerate(windows) if not window]
    plans, light = config.plans(len(clustered)), [clustered.index(number) for number in config.light_layers]
    rows = CacheRows(*plans.main, plans.light, light, int8=config.cache_dtype == "int8")

    class Reference(torch.fx.Interpreter):
        def __init__(self, graph):
            super().__init__(graph)
            self.layers = {False: 0, True: 0}

        def call_function(self, target, args, kwargs):
            if target is not attention:
                return super().call_function(target, args, kwargs)
            q, k, v, _, sinks, scale, softcap, window = args
            layer = self.layers[window > 0]
            self.layers[window > 0] += 1
            return rows.attend(layer, q, k, v, scale, softcap, sinks, window)

    logits, position, chunks = [], 0, list(ids.split(prefill_chunk or ids.shape[1], dim=1))
    while chunks:
        chunk = chunks.pop(0)
        length = chunk.shape[1]
        out = Reference(graph).run(chunk, torch.arange(position, position + length)[None])[0][:, -1]
        rows.finish_step(length)
        position += length
        if not chunks:
            logits.append(out)
            chunks = [out.argmax(dim=-1, keepdim=True)] * (len(logits) < steps)
    return torch.stack(logits), rows


def pytest_collection_modifyitems(items):
    """The longest tests go first, so that two workers end at about the same time."""
    items.sort(key=lambda item: "test_triton" not in item.nodeid)
