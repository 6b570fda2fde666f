"""Whole models through the Triton kernels: natively on a GPU, or with TRITON_INTERPRET=1 on the CPU."""

import os

import pytest
import torch
from conftest import cache_of, reference_logits, tiny_model
from device import DEVICE
from transformers import PreTrainedModel

import ckv_compile
from ckv_compile.kernels import attention, compaction

pytestmark = pytest.mark.gpu
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

# A prompt of 60 tokens takes two rounds; each program costs time here, so chunks are not tiny and layers are two.
SMALL = {"budget": 40, "interval": 8, "n_sink": 2, "n_recent": 6, "chunk_size": 16, "r_init": 0.5}
LAYERS = 2


def small_model(family: str = "llama") -> PreTrainedModel:
    return tiny_model(family, num_hidden_layers=LAYERS)


@pytest.fixture
def launches(monkeypatch):
    """Counts the calls of each launcher."""
    counts = {}

    def counted(module, name):
        run = getattr(module, name)

        def wrapper(*args, **options):
            counts[name] = counts.get(name, 0) + 1
            return run(*args, **options)

        monkeypatch.setattr(module, name, wrapper)

    for module, names in ((attention, ("decode_attention", "extend_attention")), (compaction, ("compact", "compress"))):
        for name in names:
            counted(module, name)
    return counts


@pytest.mark.parametrize(("family", "exact"), [("llama", 0.4), ("qwen2", 0.0)])
def test_a_model_over_compactions_equals_a_run_of_the_reference(family, exact, prompt, launches):
    """In float32, on a prompt whose merges the reference ranks alike in float32 and float64: so must the kernels."""
    model, ids = small_model(family), prompt(60, seed=1)
    ours = ckv_compile.transform(model.to(DEVICE), compile="eager", exact=exact, **SMALL)
    expected, rows = reference_logits(small_model(family), ours.ckv_config, ids, 12)
    exact, _ = reference_logits(small_model(family).double(), ours.ckv_config, ids, 12)
    torch.testing.assert_close(expected.double(), exact, rtol=0, atol=1e-4)
    launches.clear()
    out = ours.generate(
        ids.to(DEVICE), max_new_tokens=12, return_dict_in_generate=True, output_logits=True, do_sample=False
    )
    assert launches == {"compress": LAYERS, "decode_attention": LAYERS * 11, "compact": 11}
    torch.testing.assert_close(torch.stack(out.logits).cpu(), expected, rtol=0, atol=1e-4)
    state = cache_of(out).state
    fill = int(state.fill)
    for (_, layer, head), row in rows.rows.items():
        assert fill == row.degree.shape[0]
        assert torch.equal(state.degree[0, layer, head, :fill].cpu(), row.degree)
        torch.testing.assert_close(state.keys[0, layer, head, :fill].cpu(), row.keys, rtol=0, atol=1e-5)
        *means, last = rows.queries[0, layer, head]
        torch.testing.assert_close(state.queries[0, layer, head].cpu(), torch.stack(means), rtol=0, atol=1e-5)
        torch.testing.assert_close(state.last_queries[0, layer, head].cpu(), last, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_windows_score_caps_and_sinks_of_a_model_equal_a_run_of_the_reference(family, prompt, launches):
    model, ids = small_model(family), prompt(60, seed=1)
    ours = ckv_compile.transform(model.to(DEVICE), compile="eager", **SMALL)
    expected, rows = reference_logits(small_model(family), ours.ckv_config, ids, 4)
    exact, _ = reference_logits(small_model(family).double(), ours.ckv_config, ids, 4)
    torch.testing.assert_close(expected.double(), exact, rtol=0, atol=1e-4)
    launches.clear()
    out = ours.generate(
        ids.to(DEVICE), max_new_tokens=4, return_dict_in_generate=True, output_logits=True, do_sample=False
    )
    assert launches == {"extend_attention": LAYERS, "compress": 1, "decode_attention": LAYERS * 3, "compact": 3}
    torch.testing.assert_close(torch.stack(out.logits).cpu(), expected, rtol=0, atol=1e-4)
    state = cache_of(out).state
    slots = torch.arange(63 - 20, 63) % 20
    for (_, layer, head), row in rows.windows.items():
        torch.testing.assert_close(state.window_keys[0, layer, head, slots].cpu(), row.keys, rtol=0, atol=1e-5)


def test_a_later_turn_attends_to_the_clusters(prompt, launches):
    ours = ckv_compile.transform(small_model().to(DEVICE), compile="eager", **SMALL)
    cache = ours.new_cache()
    ours(prompt(60).to(DEVICE), past_key_values=cache)
    turn, again = prompt(7, seed=1).to(DEVICE), cache.fork()
    launches.clear()
    at_once = ours(turn, past_key_values=cache).logits
    assert launches["extend_attention"] == LAYERS
    for token in turn.split(1, dim=1):
        one_by_one = ours(token, past_key_values=again).logits
    torch.testing.assert_close(at_once, one_by_one, rtol=0, atol=1e-3)


def test_rows_that_end_early_and_sampling(prompt):
    """A batch through the generation loop; a row that ended is left as it is."""
    ours = ckv_compile.transform(small_model().to(DEVICE), compile="eager", **SMALL)
    options = {"max_new_tokens": 10, "pad_token_id": 0, "attention_mask": torch.ones(2, 45, dtype=torch.int64)}
    ids = prompt(45, batch=2).to(DEVICE)
    torch.manual_seed(0)
    free = ours.generate(ids, do_sample=True, top_k=9, **(options | {"max_new_tokens": 5}))
    torch.manual_seed(0)
    end = int(free[0, 49])
    out = ours.generate(ids, do_sample=True, top_k=9, eos_token_id=end, return_dict_in_generate=True, **options)
    assert out.sequences[0, 49] == end
    assert not out.sequences[0, 50:].any()
    rows = out.sequences.tolist()
    lengths = [row.index(end, 45) + 1 if end in row[45:] else len(row) for row in rows]
    assert cache_of(out).state.position.tolist() == [min(length, len(rows[0]) - 1) for length in lengths]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"chunk_size": 512}, "chunk_size=512 is too large for the GPU kernels")],
)
def test_what_the_kernels_cannot_serve_is_refused(options, message):
    with pytest.raises(ckv_compile.ConfigError, match=message):
        ckv_compile.transform(small_model().to(DEVICE), compile="eager", **(SMALL | options))
