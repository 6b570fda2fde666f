"""transform() and generate() on tiny models: numerics against transformers and against the reference, and errors."""

import functools
import math
import re
import threading

import pytest
import torch
from conftest import FAMILIES, VOCABULARY, cache_of, reference_logits, tiny_model
from torch._inductor.utils import run_and_get_code
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LogitsProcessor,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

import ckv_compile
from ckv_compile import slots
from ckv_compile.kernels import cpu

EXACT = {"atol": 1e-4, "rtol": 1e-4}  # the bar for agreement with transformers in float32
SMALL = {"budget": 40, "interval": 16, "n_sink": 2, "n_recent": 6, "chunk_size": 16}


@functools.cache
def pair(family="llama", compile="eager", **options):
    model = tiny_model(family)
    return model, ckv_compile.transform(model, compile=compile, **(options or {"budget": 256}))


def generate(model, ids, tokens, **options):
    return model.generate(
        ids, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
    )


# --------------------------------------------------------------------------------------- budget >= length: exact


@pytest.mark.parametrize("compile", ["eager", "inductor"])
@pytest.mark.parametrize("family", FAMILIES)
def test_within_budget_logits_and_tokens_are_those_of_transformers(family, compile, prompt):
    model, ours = pair(family, compile)
    for length in (90, 7, 150):  # longer then shorter prompts and back: nothing is left behind
        ids = prompt(length, seed=length)
        expected, found = generate(model, ids, 64), generate(ours, ids, 64)
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), **EXACT)


@pytest.mark.parametrize("compile", ["eager", "inductor"])
def test_prefill_at_once_equals_token_by_token(compile, prompt):
    _, ours = pair("llama", compile)
    ids = prompt(33)
    at_once = ours(ids)
    cache = ours.new_cache()
    for position in range(33):
        logits = ours(ids[:, position : position + 1], past_key_values=cache).logits
    torch.testing.assert_close(logits, at_once.logits, **EXACT)
    for one, other in zip(cache.state, cache_of(at_once).state, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_later_turn_continues_the_cache(prompt):
    model, ours = pair()
    ids = prompt(60)
    cache = ours.new_cache()
    for start, stop in ((0, 30), (30, 31), (31, 60)):
        logits = ours(ids[:, start:stop], past_key_values=cache).logits
    assert cache.get_seq_length() == 60
    torch.testing.assert_close(logits, model(ids).logits[:, -1:], **EXACT)
    continued = ours.generate(ids, past_key_values=cache_after(ours, ids[:, :40]), max_new_tokens=8, do_sample=False)
    assert torch.equal(continued, model.generate(ids, max_new_tokens=8, do_sample=False))


def cache_after(ours, ids):
    cache = ours.new_cache()
    ours(ids, past_key_values=cache)
    return cache


# ------------------------------------------------------------------------------------ with compaction: the reference


@pytest.mark.parametrize("length", [30, 200], ids=["short prompt", "compacted prompt"])
@pytest.mark.parametrize("compile", ["eager", "inductor"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_with_compaction_the_model_equals_a_run_of_the_reference(family, compile, length, prompt):
    """In float64, so that no two similarities of random keys are equal to within rounding and rank differently."""
    model = tiny_model(family).double()
    ours = ckv_compile.transform(model, compile=compile, **SMALL)
    steps = 3 * SMALL["interval"] + 30  # at least three decode compactions
    found = generate(ours, prompt(length), steps)
    expected, rows = reference_logits(model, ours.ckv_config, prompt(length), steps)
    # generate() hands out float32 logits.
    torch.testing.assert_close(torch.stack(found.logits), expected.float(), atol=1e-5, rtol=1e-5)
    state = cache_of(found).state
    total = length + steps - 1  # the last token was never fed back
    assert int(state.position) == rows.position[0] == total
    used = int(state.fill)
    for (b, layer, head), row in rows.rows.items():
        assert used == row.keys.shape[0] <= ours.ckv_config.capacity
        # Norms and rotary angles are float32 in these models whatever the dtype.
        torch.testing.assert_close(state.keys[b, layer, head, :used], row.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state.values[b, layer, head, :used], row.values, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state.degree[b, layer, head, :used], row.degree)
    assert (state.degree.sum(dim=-1) == total).all()


@torch.no_grad()
@pytest.mark.parametrize("chunk", [None, 30])
def test_light_layers_beside_windows_equal_a_run_of_the_reference(chunk, prompt):
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    model = tiny_model("gemma3", num_hidden_layers=4, layer_types=kinds).double()
    light = {"light_layers": [2], "light_share": 0.6, "prefill_chunk": chunk}
    ours = ckv_compile.transform(model, compile="eager", **(SMALL | light))
    found = generate(ours, prompt(100), 40)
    expected, _ = reference_logits(model, ours.ckv_config, prompt(100), 40, chunk)
    torch.testing.assert_close(torch.stack(found.logits), expected.float(), atol=1e-5, rtol=1e-5)


def test_rows_that_end_early_leave_their_light_layers_as_they_were(prompt):
    ours = ckv_compile.transform(tiny_model(), compile="eager", **SMALL, light_layers=[1], light_share=0.6)
    ids = prompt(50, batch=2)
    alone = generate(ours, ids[:1], 30).sequences[0, 50:].tolist()
    end = next(token for i, token in enumerate(alone) if i and token not in alone[:i])
    ends = {"eos_token_id": end, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    batch = ours.generate(ids, max_new_tokens=30, do_sample=False, return_dict_in_generate=True, **ends)
    state, ended = cache_of(batch).state, alone.index(end)
    assert int(state.position[0]) < int(state.position[1])
    assert int(state.position[0]) == 50 + ended + 1  # the end itself is taken
    for degree in (state.degree, state.light_degree):
        assert (degree[0].sum(dim=-1) == 50 + ended + 1).all()


@torch.no_grad()
@pytest.mark.parametrize("compile", ["eager", "inductor"])
def test_with_light_layers_the_model_equals_a_run_of_the_reference(compile, prompt):
    model = tiny_model().double()
    light = {"light_layers": [0, 2], "light_share": 0.6}
    ours = ckv_compile.transform(model, compile=compile, **(SMALL | light))
    found = generate(ours, prompt(100), 44)
    expected, rows = reference_logits(model, ours.ckv_config, prompt(100), 44)
    torch.testing.assert_close(torch.stack(found.logits), expected.float(), atol=1e-5, rtol=1e-5)
    state, (main, light) = cache_of(found).state, ours.ckv_config.plans(3)
    assert (light.schedule.budget, main.schedule.budget) == (24, 72)  # 40 in the mean
    for layer, (own, index) in enumerate([(state.light, 0), (state.main, 0), (state.light, 1)]):
        for head in range(3):
            row, used = rows.rows[0, layer, head], int(own[5])
            assert row.keys.shape[0] == used
            torch.testing.assert_close(own[0][0, index, head, :used], row.keys, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(own[2][0, index, head, :used], row.degree)
    even = ckv_compile.transform(model, compile="eager", **SMALL)
    assert ours.new_cache().nbytes() == even.new_cache().nbytes()


@torch.no_grad()
def test_slots_of_8_bits_stay_near_a_run_of_the_reference_and_take_a_quarter_of_the_bytes(prompt):
    """A merged number between two may be rounded to either, so near means the size of that; the tokens are the same."""
    ids = prompt(100)
    model, ours = pair("llama", "inductor", cache_dtype="int8", **SMALL)
    expected, rows = reference_logits(model, ours.ckv_config, ids, 40)
    found = generate(ours, ids, 40)
    state = cache_of(found).state
    assert torch.equal(found.sequences[0, 100:], expected[:, 0].argmax(dim=-1))
    assert float((torch.stack(found.logits) - expected).abs().median()) < 1e-3
    for (_, layer, head), row in rows.rows.items():
        assert torch.equal(slots.weights(state.keys, state.degree)[0, layer, head, : len(row.degree)], row.degree)
    wide = pair("llama", "eager", **SMALL)[1].new_cache().state
    assert 4 * (state.keys.nbytes + state.values.nbytes) == wide.keys.nbytes + wide.values.nbytes
    assert state.degree.nbytes == 3 * wide.degree.nbytes


def test_the_path_that_ships_equals_the_reference_in_float32(prompt):
    """C++ attention, reductions for linears, Inductor: with random keys far enough apart to rank alike in float32."""
    assert cpu.is_available(torch.float32)
    model, ours = pair("llama", "inductor", **SMALL)
    found = generate(ours, prompt(200, seed=1), 78)
    expected, _ = reference_logits(model, ours.ckv_config, prompt(200, seed=1), 78)
    torch.testing.assert_close(torch.stack(found.logits), expected, **EXACT)


def test_a_compiled_batch_of_unequal_rows_equals_each_row_alone_over_compactions(prompt):
    ours = ckv_compile.transform(tiny_model().double(), **SMALL)
    ids, mask = prompt(100, batch=3), torch.ones(3, 100, dtype=torch.int64)
    paddings = (0, 99, 60)
    for row, padding in enumerate(paddings):
        ids[row, :padding], mask[row, :padding] = 0, 0
    batch = generate(ours, ids, 60, attention_mask=mask)
    assert set(ours._decode_programs) == {3}  # the row of one token needs no program of its own
    for row, padding in enumerate(paddings):
        alone = generate(ours, ids[row : row + 1, padding:], 60)
        assert torch.equal(alone.sequences[0], batch.sequences[row, padding:])
        for one, other in zip(alone.logits, batch.logits, strict=True):
            torch.testing.assert_close(one[0], other[row], atol=1e-5, rtol=1e-5)


def test_the_cache_is_exactly_budget_plus_interval_slots_and_never_grows(prompt):
    _, ours = pair("llama", "eager", **SMALL)
    cache = cache_of(generate(ours, prompt(100), 70))
    slots = SMALL["budget"] + SMALL["interval"]
    # layers x KV heads x (slots x (K and V of 8 floats each, and a degree), and 2 means and 8 * 2 last ones of queries)
    assert cache.nbytes() == 3 * 3 * (slots * (2 * 8 * 4 + 4) + 2 * 8 * 4 + 8 * 2 * 8 * 4)
    assert cache.state.keys.shape == (1, 3, 3, slots, 8)


def test_reset_leaves_nothing_behind(prompt):
    _, ours = pair("llama", "eager", **SMALL)
    cache = ours.new_cache()
    ours(prompt(100, seed=1), past_key_values=cache)
    cache.reset()
    again, fresh = ours(prompt(50), past_key_values=cache), ours(prompt(50))
    assert torch.equal(again.logits, fresh.logits)
    for one, other in zip(cache.state, cache_of(fresh).state, strict=True):
        assert torch.equal(one, other)


def test_the_model_is_not_changed_and_the_weights_are_shared():
    model, ours = pair()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ours.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert {p.data_ptr() for p in ours.parameters()} == {p.data_ptr() for p in model.parameters()}
    assert not model.training


def test_decode_never_recompiles_over_a_generation_and_between_generations(prompt, monkeypatch):
    """With every guard kept, so that there is something to recompile: the evidence that dropping them is safe."""
    monkeypatch.setattr("ckv_compile.pipeline._no_guards", lambda guards: [True for _ in guards])
    ours = ckv_compile.transform(tiny_model(), compile="inductor", **SMALL)
    torch._dynamo.utils.counters.clear()
    ours.warm_up()
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for length in (60, 5, 130):
        ours.generate(prompt(length), max_new_tokens=40)
    cache = cache_after(ours, prompt(30))
    ours(prompt(1), past_key_values=cache)
    with torch.inference_mode():
        ours(prompt(1), past_key_values=cache)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_the_compiled_step_copies_no_cache():
    """The code that Inductor wrote hands its own arguments to the ops and allocates nothing as large as a layer."""
    ours = ckv_compile.transform(tiny_model(), compile="inductor", **SMALL)
    cache = ours.new_cache()
    _, (code,) = run_and_get_code(lambda: ours(torch.tensor([[1]]), past_key_values=cache))
    calls = re.findall(
        r"ckv\.cached_attention\.default\(.*?\), (arg\d+_1(?:, arg\d+_1){4}), arg\d+_1, arg\d+_1, arg\d+_1, (\d)",
        code,
    )
    assert [layer for _, layer in calls] == ["0", "1", "2"]
    (state,) = {arguments for arguments, _ in calls}  # the same five inputs in every layer
    (compaction,) = re.findall(r"ckv\.compact_\.default\((arg\d+_1(?:, arg\d+_1){4}),", code)
    assert compaction == state
    allocated = [eval(shape) for shape in re.findall(r"= empty_strided_cpu\((\(.*?\)),", code)]
    assert allocated
    assert max(map(math.prod, allocated)) < cache.state.keys[0, 0].numel()


# --------------------------------------------------------------------------------------------- generate()'s features


def test_sampling_is_that_of_transformers_for_the_same_seed(prompt):
    model, ours = pair()
    options = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
    outputs = []
    for each in (model, ours):
        torch.manual_seed(7)
        outputs.append(each.generate(prompt(20), **options))
    assert torch.equal(*outputs)


def test_num_return_sequences_and_batches_of_left_padded_rows(prompt):
    model, ours = pair()
    ids, mask = prompt(24, batch=3), torch.ones(3, 24, dtype=torch.int64)
    for row, padding in enumerate((0, 9, 23)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    batch = generate(ours, ids, 20, attention_mask=mask)
    assert torch.equal(batch.sequences, generate(model, ids, 20, attention_mask=mask).sequences)
    for row, padding in enumerate((0, 9, 23)):
        alone = generate(ours, ids[row : row + 1, padding:], 20)
        assert torch.equal(alone.sequences[0], batch.sequences[row, padding:])
        assert int(cache_of(batch).state.position[row]) == 24 - padding + 19
    torch.manual_seed(0)
    several = ours.generate(prompt(10), num_return_sequences=3, do_sample=True, max_new_tokens=5)
    assert several.shape == (3, 15)


def test_processors_criteria_streamers_and_generation_configs_take_part(prompt):
    _, ours = pair()

    class Only(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, float("-inf")).index_fill_(1, torch.tensor([5]), 0.0)

    class AfterFour(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 14)

    streamed = []

    class Collect(BaseStreamer):
        def put(self, value):
            streamed.extend(value.flatten().tolist())

        def end(self):
            streamed.append(-1)

    config = ours.generation_config.__class__(max_new_tokens=9, do_sample=False)
    out = ours.generate(
        prompt(10), config, logits_processor=[Only()], stopping_criteria=[AfterFour()], streamer=Collect()
    )
    assert out[0, 10:].tolist() == [5, 5, 5, 5]
    assert streamed == [*prompt(10)[0].tolist(), 5, 5, 5, 5, -1]


def test_inference_mode_no_grad_and_autocast_do_not_change_the_tokens(prompt):
    _, ours = pair("llama", "inductor", **SMALL)
    expected = ours.generate(prompt(50), max_new_tokens=30)
    for context in (torch.inference_mode(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            assert torch.equal(ours.generate(prompt(50), max_new_tokens=30), expected)


@pytest.mark.parametrize("compile", ["eager", "inductor"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_generates_over_compactions(dtype, family, compile, prompt):
    model = tiny_model(family).to(dtype)
    ours = ckv_compile.transform(model, compile=compile, **SMALL)
    out = generate(ours, prompt(100), 60)
    assert torch.isfinite(torch.stack(out.logits)).all()
    state = cache_of(out).state
    assert state.keys.dtype == state.window_keys.dtype == dtype
    assert state.degree.dtype == torch.float32
    assert (state.degree.sum(dim=-1) == 159).all()
    exact = ckv_compile.transform(model, budget=200, compile="eager")
    agreed = generate(exact, prompt(100), 2).logits[0]
    # Two roundings of the attention output in eight (bfloat16) or eleven bits.
    torch.testing.assert_close(agreed, generate(model, prompt(100), 2).logits[0], atol=0.05, rtol=0.05)


# ------------------------------------------------------------------------------------------------------------- errors


def test_an_interrupted_step_breaks_the_cache_until_reset(prompt, monkeypatch):
    _, ours = pair()
    cache = cache_after(ours, prompt(20))

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ckv_compile.ops._append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ours(prompt(8), past_key_values=cache)
    with pytest.raises(ckv_compile.InputError, match="interrupted half-way"):
        ours(prompt(8), past_key_values=cache)
    cache.reset()
    assert torch.equal(ours(prompt(8), past_key_values=cache).logits, ours(prompt(8)).logits)


def test_a_missing_compiler_is_named_before_the_prefill(prompt, monkeypatch):
    ours = ckv_compile.transform(tiny_model(), budget=128)
    monkeypatch.setattr("ckv_compile.ops._extend_attention", None)  # a prefill would fail
    with (
        torch._inductor.config.patch({"cpp.cxx": ("/nonexistent/c++",), "force_disable_caches": True}),
        pytest.raises(ckv_compile.CompileError, match=r'compile="eager"\) does without'),
    ):
        ours.generate(prompt(9), max_new_tokens=2)


def test_a_convolution_beside_the_attention_is_refused():
    class Mixing(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden):
            return self.inner(hidden) + torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]

    model = tiny_model()
    model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)
    with pytest.raises(ckv_compile.UnsupportedModelError, match="another way than attention"):
        ckv_compile.transform(model, budget=100)


def test_positions_that_do_not_come_from_position_ids_are_refused(monkeypatch):
    model = tiny_model()
    rotary = model.model.rotary_emb
    own = rotary.forward

    def from_shape(x, position_ids, *args, **kwargs):
        return own(x, torch.arange(x.shape[1])[None], *args, **kwargs)

    monkeypatch.setattr(rotary, "forward", from_shape)
    with pytest.raises(ckv_compile.UnsupportedModelError, match="another way than attention over position_ids"):
        ckv_compile.transform(model, budget=100)


@pytest.mark.parametrize(
    "options",
    [
        {"width": 20},  # the whole prompt again
        {"width": 12},  # the new turn without a mask that covers the cache
        {"width": 12, "mask": 12},
        {"width": 30, "mask": 25},
    ],
)
def test_a_prompt_that_transformers_would_cut_wrongly_is_refused(options, prompt):
    _, ours = pair()
    mask = torch.ones(1, options["mask"], dtype=torch.int64) if "mask" in options else None
    with pytest.raises(ckv_compile.InputError, match="continues a cache of 20"):
        ours.generate(
            prompt(options["width"]),
            attention_mask=mask,
            past_key_values=cache_after(ours, prompt(20)),
            max_new_tokens=2,
        )


def test_a_new_turn_with_a_mask_over_the_cache_continues_it(prompt):
    model, ours = pair()
    ids = prompt(45)
    cache = cache_after(ours, ids[:, :30])
    mask = torch.ones(1, 45, dtype=torch.int64)
    turn = ours.generate(ids[:, 30:], attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False)
    assert torch.equal(turn[:, 15:], model.generate(ids, max_new_tokens=6, do_sample=False)[:, 45:])


def test_what_a_clustered_cache_cannot_do_is_refused():
    cache = pair()[1].new_cache()
    with pytest.raises(ckv_compile.InputError, match="cannot be reordered"):
        cache.reorder_cache(torch.tensor([0]))
    assert not cache.is_croppable


def test_int32_tokens_are_those_of_int64(prompt):
    _, ours = pair("llama", "inductor", **SMALL)
    for ids in (prompt(1, batch=2), prompt(9)):
        assert torch.equal(ours(ids.int()).logits, ours(ids).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "budget is missing"),
        ({"budget": 0.5, "bugdet": 3}, "unknown option 'bugdet': did you mean 'budget'"),
        ({"budget": 20}, "budget=20 slots cannot hold"),
        ({"budget": 0.05}, "budget=26 slots cannot hold"),
        ({"budget": 60, "interval": 100}, "interval=100 is larger than"),
        ({"budget": 1.0}, "strictly between 0 and 1"),
        ({"budget": float("nan")}, "finite"),
        ({"budget": 100, "compile": "fast"}, "compile='fast'"),
        ({"budget": 100, "config": ckv_compile.CKVConfig(budget=100)}, "not both"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_bad_options_are_refused_before_anything_is_built(options, message, monkeypatch):
    monkeypatch.setattr("ckv_compile.pipeline.capture", None)
    with pytest.raises(ckv_compile.ConfigError, match=message):
        ckv_compile.transform(tiny_model(), **options)


def test_models_that_cannot_be_transformed_say_why():
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8))
    with pytest.raises(ckv_compile.UnsupportedModelError, match="encoder-decoder"):
        ckv_compile.transform(t5, budget=100)
    with pytest.raises(ckv_compile.UnsupportedModelError, match="no language-model head"):
        ckv_compile.transform(tiny_model().model, budget=100)
    with pytest.raises(ckv_compile.UnsupportedModelError, match="input_ids, position_ids\\), got Linear"):
        ckv_compile.transform(torch.nn.Linear(2, 2), budget=100)
    with pytest.raises(ckv_compile.UnsupportedModelError, match="already transformed"):
        ckv_compile.transform(pair()[1], budget=100)
    split = tiny_model()
    split.lm_head.to("meta")
    with pytest.raises(ckv_compile.UnsupportedModelError, match=r"several devices \(cpu, meta\)"):
        ckv_compile.transform(split, budget=100)
    with pytest.raises(ckv_compile.UnsupportedModelError, match="on the CPU or on a CUDA device"):
        ckv_compile.transform(tiny_model().to("meta"), budget=100)


def test_dropout_in_training_mode_is_refused():
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32)).train()
    with pytest.raises(ckv_compile.UnsupportedModelError, match=r"dropout with p=0\.1: call model\.eval"):
        ckv_compile.transform(model, budget=100)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.generate(torch.zeros(1, 0, dtype=torch.int64)), r"at least one token, got \(1, 0\)"),
        (lambda m: m.generate(torch.tensor([[1, VOCABULARY]])), "token ids from 1 to 128; this model's are 0 to 127"),
        (lambda m: m.generate(torch.tensor([[1, -1]])), "token ids from -1 to 1"),
        (lambda m: m.generate(torch.ones(9, 4, dtype=torch.int64)), "9 rows; this model was transformed for 1 to 8"),
        (lambda m: m.generate(torch.tensor([[1]]), num_return_sequences=9, do_sample=True), "a batch of 9 rows"),
        (lambda m: m.generate(torch.tensor([[1]]), num_beams=2), "beam_search is not supported"),
        (lambda m: m.generate(torch.tensor([[1]]), use_cache=False), "use_cache=False"),
        (lambda m: m.generate(torch.tensor([[1]]), cache_implementation="static"), "cache_implementation='static'"),
        (lambda m: m(torch.tensor([[1.0, 2.0]])), "token ids are int64, got torch.float32"),
        (lambda m: m(torch.tensor([[1, 2]]), logits_to_keep=0), "logits_to_keep=1"),
        (
            lambda m: m(torch.tensor([[1, 2]]), attention_mask=torch.tensor([[1, 0]])),
            "padding_side='left'",
        ),
        (lambda m: m(torch.tensor([[1, 2]]), attention_mask=torch.tensor([[0, 0]])), "hides a whole row"),
        (lambda m: m(torch.tensor([[1]]), attention_mask=torch.tensor([[0]])), "hides a whole row"),
        (lambda m: m(torch.tensor([[1, 2]]), attention_mask=torch.tensor([[1]])), "it covers both"),
        (
            lambda m: m(
                torch.tensor([[1, 2]]),
                attention_mask=torch.tensor([[0, 1, 1, 1]]),
                past_key_values=cache_after(m, torch.tensor([[1, 2]])),
            ),
            r"shows \[1\] earlier tokens of each row, but the cache holds \[2\]",
        ),
        (lambda m: m(torch.tensor([[1.0]]), past_key_values=cache_after(m, torch.tensor([[1, 2]]))), "int64, got"),
        (lambda m: m.generate([1, 2]), "token ids are a tensor, got list"),
        (lambda m: m(torch.tensor([[1, 2]]), past_key_values=m.new_cache(2)), "1 rows of tokens for a cache of 2"),
        (
            lambda m: m(torch.tensor([[1, 2]]), past_key_values=pair("llama", "eager", **SMALL)[1].new_cache()),
            "another model or config",
        ),
        (lambda m: m.new_cache(0), "batch_size=0: pass an int"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ckv_compile.InputError, match=message):
        call(pair()[1])


def test_moving_or_casting_a_compiled_model_is_refused():
    _, ours = pair()
    with pytest.raises(ckv_compile.UnsupportedModelError, match=r"cannot be moved or cast \(to torch\.float64"):
        ours.double()
    assert ours.to("cpu") is ours


def test_the_original_model_refuses_our_cache(prompt):
    model, ours = pair()
    with pytest.raises(ckv_compile.InputError, match="only works with the model returned by"):
        model(prompt(4), past_key_values=ours.new_cache())


def test_a_second_thread_is_refused_and_the_first_one_finishes(prompt):
    _, ours = pair()
    inside, done, errors = threading.Event(), threading.Event(), []

    class Wait(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            inside.set()
            done.wait(30)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def second():
        inside.wait(30)
        try:
            ours.generate(prompt(5), max_new_tokens=2)
        except ckv_compile.ConcurrentUseError as error:
            errors.append(str(error))
        finally:
            done.set()

    thread = threading.Thread(target=second)
    thread.start()
    out = ours.generate(prompt(5), max_new_tokens=3, stopping_criteria=[Wait()])
    thread.join()
    assert out.shape == (1, 8)
    assert len(errors) == 1
    assert "another thread" in errors[0]
    assert ours.generate(prompt(5), max_new_tokens=2).shape == (1, 7)
