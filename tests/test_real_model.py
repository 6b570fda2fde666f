"""SmolLM2-135M-Instruct: the main path on the real model. It fails, never skips, where the model is missing."""

import copy
import pydoc_data.topics

import pytest
import torch
from conftest import cache_of, reference_logits

import ckv_compile
from ckv_compile.loading import load_model

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def real():
    return load_model()


@pytest.fixture(scope="module")
def text(real):
    return real[1](pydoc_data.topics.topics["assert"] + pydoc_data.topics.topics["assignment"], return_tensors="pt")


def generate(model, ids, tokens):
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def test_within_budget_it_is_transformers_own_model(real, text):
    model, _ = real
    ours = ckv_compile.transform(model, budget=1024)
    assert [(result.name, result.matches) for result in ours.passes] == [
        ("freeze_rotary", 0),
        ("canonicalize_attention", 30),
        ("insert_cached_attention", 30),
        ("slice_logits", 1),
        ("insert_compaction", 1),
    ]
    for length in (400, 50, 200):
        ids = text.input_ids[:, :length]
        expected, found = generate(model, ids, 65), generate(ours, ids, 65)
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_with_compaction_it_equals_a_run_of_the_reference(real, text):
    """In float64: the repeated words of a real text have keys so alike that float32 ranks some of them by rounding."""
    model = copy.deepcopy(real[0]).double()
    ours = ckv_compile.transform(model, budget=256, interval=32)
    ids = text.input_ids[:, :600]
    found = generate(ours, ids, 110)  # three decode compactions
    expected, _ = reference_logits(model, ours.ckv_config, ids, 110)
    assert torch.equal(found.sequences[0, 600:], expected.argmax(dim=-1)[:, 0])
    torch.testing.assert_close(torch.stack(found.logits), expected.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_text_goes_on_as_text_and_the_cache_keeps_its_accounts(dtype, real, text):
    model, tokenizer = real
    ours = ckv_compile.transform(copy.deepcopy(model).to(dtype), budget=256, interval=32)
    found = generate(ours, text.input_ids[:, :1500], 110)
    cache = cache_of(found)
    assert cache.nbytes() == 30 * 3 * (
        (256 + 32) * (2 * 64 * dtype.itemsize + 4) + 2 * 64 * 4 + 8 * 3 * 64 * dtype.itemsize
    )
    assert (cache.state.degree.sum(dim=-1) == 1500 + 109).all()
    answer = tokenizer.decode(found.sequences[0, 1500:])
    assert len(set(answer.split())) > 10, f"the text has fallen apart: {answer!r}"
