"""Model families on tiny random configs of their own classes: exact within the budget, the reference beyond it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCABULARY, cache_of, reference_logits
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

import ckv_compile

SMALL = {"budget": 40, "interval": 8, "n_sink": 2, "n_recent": 6, "chunk_size": 8}
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough that tokens differ in what they attend to
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
GQA = {"num_key_value_heads": 3}
GPT2 = {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 512, "n_inner": 96}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MIXED = ["sliding_attention", "full_attention"]
BART = {"d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 6, "decoder_ffn_dim": 96, "encoder_layers": 2}
MLA = {  # keys of 16, values of 8
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 6,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
FAMILIES = {
    "llama": GQA | {"rope_parameters": LLAMA3_ROPE},
    "smollm3": GQA,  # layers without RoPE
    "mixtral": GQA | {"sliding_window": None, "num_local_experts": 4},
    "qwen2_moe": GQA | EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": GQA | EXPERTS | {"head_dim": 8},
    "olmoe": GQA | {"num_experts": 8},
    "phimoe": GQA | {"sliding_window": None, "num_local_experts": 4},
    "granitemoe": GQA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma": GQA | {"head_dim": 16},
    "gemma2": GQA | {"head_dim": 16, "sliding_window": 16},  # score caps
    "gemma3_text": GQA | {"head_dim": 16, "sliding_window": 16, "layer_types": MIXED},
    "phi": {},  # partial rotary, a KV head for every query head
    "phi3": GQA | {"sliding_window": None, "partial_rotary_factor": 0.5},  # fused projections
    "mistral": GQA | {"sliding_window": 16},
    "ministral": GQA | {"sliding_window": 16, "head_dim": 8, "layer_types": MIXED},
    "gpt_oss": GQA | {"num_local_experts": 4, "head_dim": 8, "sliding_window": 16, "layer_types": MIXED},  # sinks
    "gpt_neox": {},
    "gpt2": GPT2,  # learned positions
    "gptj": GPT2 | {"rotary_dim": 4},
    "codegen": GPT2 | {"rotary_dim": 4},
    "gpt_bigcode": GPT2,  # one KV head
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 48},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
    "biogpt": {},
    "persimmon": {},
    "stablelm": GQA,
    "olmo": GQA,
    "olmo2": GQA,
    "granite": GQA,
    "cohere": GQA,
    "cohere2": GQA | {"sliding_window": 16, "layer_types": MIXED},
    "starcoder2": GQA | {"sliding_window": None},
    "glm4": GQA | {"head_dim": 8},
    "nemotron": GQA,
    "deepseek_v3": MLA
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "diffllama": {"num_key_value_heads": 2},  # every layer attends twice
    "exaone4": GQA | {"sliding_window": 16, "layer_types": MIXED},
}


def tiny(family):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SHAPE | FAMILIES[family]))).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_within_budget_it_is_transformers_own_model(family, prompt):
    model = tiny(family)
    ours = ckv_compile.transform(model, budget=128, compile="eager")
    options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected, found = (each.generate(prompt(50), **options) for each in (model, ours))
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_with_compaction_it_is_a_run_of_the_reference(family, prompt):
    """In float64, so that no two similarities of random keys are equal to within rounding and rank differently."""
    model = tiny(family).double()
    model.config._experts_implementation = "batched_mm"  # the default one has no float64
    ours = ckv_compile.transform(model, compile="eager", **SMALL)
    steps = 2 * SMALL["interval"] + 3
    found = ours.generate(
        prompt(60), max_new_tokens=steps, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    expected, rows = reference_logits(model, ours.ckv_config, prompt(60), steps)
    # generate() hands out float32 logits.
    torch.testing.assert_close(torch.stack(found.logits), expected.float(), atol=1e-4, rtol=1e-4)
    state = cache_of(found).state
    assert int(state.position) == 60 + steps - 1
    for (_, layer, head), row in rows.rows.items():
        assert torch.equal(state.degree[0, layer, head, : int(state.fill)], row.degree)
    for (_, layer, head), row in rows.windows.items():  # the tokens before the next, in the slots that they belong to
        slots = torch.arange(60 + steps - 1 - row.keys.shape[0], 60 + steps - 1) % row.keys.shape[0]
        torch.testing.assert_close(state.window_keys[0, layer, head, slots], row.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state.window_values[0, layer, head, slots], row.values, atol=1e-5, rtol=1e-5)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
}


def test_rotary_frequencies_are_those_of_the_longest_context_and_the_model_keeps_its_own(prompt):
    """Phi-3 with longrope: beyond 64 tokens transformers takes other frequencies; a cache must choose once."""
    changes = GQA | {"sliding_window": None, "rope_parameters": LONGROPE}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi3", **(SHAPE | changes))).eval()
    untouched = copy.deepcopy(model)
    long = ckv_compile.transform(model, budget=200, compile="eager")  # of 512 tokens
    short = ckv_compile.transform(model, budget=200, compile="eager", max_context=64)
    assert [result.matches for result in long.passes if result.name == "freeze_rotary"] == [1]
    options = {"max_new_tokens": 20, "do_sample": False}
    for ours, length in ((long, 100), (short, 30)):
        expected = untouched.generate(prompt(length), **options)
        assert torch.equal(ours.generate(prompt(length), **options), expected)
        assert torch.equal(model.generate(prompt(length), **options), expected)
    mask = torch.ones(2, 100, dtype=torch.int64)
    mask[0, :90] = 0  # a short row beside a long one
    ids = torch.cat([torch.cat([prompt(90), prompt(10, seed=1)], dim=1), prompt(100)])
    together = long.generate(ids, attention_mask=mask, **options)
    assert torch.equal(together[0, 90:], long.generate(prompt(10, seed=1), **options)[0])


def test_a_model_that_does_not_run_itself_is_refused_with_its_own_error():
    with pytest.raises(
        ckv_compile.UnsupportedModelError, match="MixtralForCausalLM itself fails on a prompt of 12 tokens"
    ):
        ckv_compile.transform(tiny("mixtral").double(), budget=100, compile="eager")  # its experts have no float64


def test_an_attention_of_ones_own_is_not_replaced_in_silence():
    def halved(module, query, key, value, mask, scaling=None, **_):
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling / 2, enable_gqa=True)
        return out.transpose(1, 2), None

    AttentionInterface.register("halved", halved)
    try:
        model = tiny("llama")
        model.set_attn_implementation("halved")
        with pytest.raises(ckv_compile.UnsupportedModelError, match="does not compute what LlamaForCausalLM does"):
            ckv_compile.transform(model, budget=100)
    finally:
        del AttentionInterface._global_mapping["halved"]


class Plain(nn.Module):
    """A decoder of one's own: no transformers, two layers, rotary positions, four query and two KV heads of size 8."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(32, 64), "out": nn.Linear(32, 32), "norm": nn.LayerNorm(32)}) for _ in "ab"
        )
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids, position_ids):
        hidden = self.embed(input_ids)
        angle = position_ids[:, None, :, None] * 100.0 ** -torch.linspace(0, 1, 4)  # [B, 1, S, 4]

        def rotate(x):
            one, other = x.chunk(2, dim=-1)
            return torch.cat(
                [one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], dim=-1
            ).to(x.dtype)

        for layer in self.layers:
            heads = layer["qkv"](layer["norm"](hidden)).unflatten(-1, (8, 8)).transpose(1, 2)
            q, k, v = heads.split([4, 2, 2], dim=1)
            out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
            hidden = hidden + layer["out"](out.transpose(1, 2).flatten(2))
        return self.head(hidden)


@pytest.mark.parametrize("compile", ["eager", "inductor"])
@torch.no_grad()
def test_a_module_without_transformers_generates_too(compile, prompt):
    torch.manual_seed(0)
    model = Plain().double().eval()
    ours = ckv_compile.transform(model, budget=128, compile=compile)
    ids = prompt(30)
    for _ in range(40):
        ids = torch.cat([ids, model(ids, torch.arange(ids.shape[1])[None])[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(ours.generate(prompt(30), max_new_tokens=40), ids)
    small = ckv_compile.transform(model, compile=compile, **SMALL)
    found = small.generate(prompt(60), max_new_tokens=19, return_dict_in_generate=True, output_logits=True)
    expected, _ = reference_logits(model, small.ckv_config, prompt(60), 19)
    torch.testing.assert_close(torch.stack(found.logits), expected.float(), atol=1e-5, rtol=1e-5)
    with pytest.raises(ckv_compile.ConfigError, match="is a fraction of max_context"):
        ckv_compile.transform(model, budget=0.5)


def test_a_module_without_positions_is_refused():
    class Own(Plain):
        def forward(self, input_ids, position_ids):
            return super().forward(input_ids, torch.arange(input_ids.shape[1])[None])

    with pytest.raises(ckv_compile.UnsupportedModelError, match="does not decode what the model computes"):
        ckv_compile.transform(Own().eval(), budget=100)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bloom", {"n_layer": 2, "n_head": 6}, r"module transformer\.h\.0\.self_attention: .* does not call SDPA"),
        ("mpt", {"d_model": 48, "n_heads": 6, "n_layers": 2}, r"module transformer\.blocks\.0\.attn: .* call SDPA"),
        (
            "falcon",
            {"alibi": True, "new_decoder_architecture": False},
            r"module transformer\.h\.0\.self_attention: .*a bias that depends on distance",
        ),
        ("mamba", {}, r"where backbone\.layers\.0\.mixer \(MambaMixer\) mixes tokens by a convolution"),
        ("moshi", {"sliding_window": 16}, "a sliding window of 16 tokens in its config, but none in its masks"),
        ("bart", BART, "logits differ .* its positions are counted from its own cache"),
        ("deepseek_v32", MLA, "DeepseekV32Attention gives its attention `indices`, beside a mask"),
        (
            "llama4_text",
            GQA | {"attention_chunk_size": 16, "interleave_moe_layer_step": 9, "head_dim": 8},
            "expected a causal mask or a sliding window, found a mask in steps or blocks, by aten.floor_divide",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_what_cannot_be_served_is_refused_with_module_and_reason(family, changes, message):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SHAPE | changes))).eval()
    with pytest.raises(ckv_compile.UnsupportedModelError, match=f"(?s){message}"):
        ckv_compile.transform(model, budget=100, compile="eager")
