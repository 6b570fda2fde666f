"""Capture: the model is left as it was, whatever happens, and the graph holds the model's own weights."""

import pytest
import torch
from conftest import tiny_model
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import ckv_compile
from ckv_compile.capture import capture
from ckv_compile.errors import UnsupportedModelError


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, model.config.to_dict(), model.training


def test_the_graph_shares_the_weights():
    model = tiny_model()
    graph = capture(model)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in graph.parameters()} == own
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_batch_and_length_are_dynamic(prompt):
    model = tiny_model()
    graph = capture(model)
    for batch, length in ((1, 2), (3, 7), (2, 90)):
        ids = prompt(length, batch)
        logits = graph(ids, torch.arange(length).repeat(batch, 1))[0]
        torch.testing.assert_close(logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_model_with_eager_attention_is_traced_through_sdpa_and_gets_its_attention_back(prompt):
    model = tiny_model(attn_implementation="eager")
    weights, config, training = snapshot(model)
    ours = ckv_compile.transform(model, budget=128, compile="eager")
    assert model.config._attn_implementation == "eager"
    after = snapshot(model)
    assert after[1:] == (config, training)
    assert all(torch.equal(weights[name], tensor) for name, tensor in after[0].items())
    ids = prompt(12)
    assert torch.equal(ours.generate(ids, max_new_tokens=5), model.generate(ids, max_new_tokens=5))


def test_training_flags_of_single_modules_are_kept():
    model = tiny_model().train()
    model.model.layers[1].eval()
    flags = [module.training for module in model.modules()]
    capture(model)
    assert [module.training for module in model.modules()] == flags


def test_casting_the_original_does_not_reach_a_compiled_model(prompt):
    model = tiny_model()
    ours = ckv_compile.transform(model, budget=128)
    expected = ours.generate(prompt(9), max_new_tokens=6)
    model.to(torch.float64)
    assert torch.equal(ours.generate(prompt(9), max_new_tokens=6), expected)


def test_the_attention_is_restored_when_the_capture_fails(monkeypatch):
    model = tiny_model(attn_implementation="eager")

    def broken(*args, **kwargs):
        raise RuntimeError("data-dependent control flow")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", broken)
    with pytest.raises(UnsupportedModelError, match=r"could not trace LlamaForCausalLM \(RuntimeError: data-dependent"):
        capture(model)
    assert model.config._attn_implementation == "eager"
    assert "ckv" not in AttentionInterface._global_mapping
    assert "ckv" not in AttentionMaskInterface._global_mapping


class Branches(nn.Module):
    """A decoder without attention that takes another path from some length on."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.embed, self.head = length, nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        return self.head(-hidden if input_ids.shape[1] > self.length else hidden)


def test_a_branch_on_the_length_is_found():
    assert capture(Branches(64)).meta["longest"] == 64
    assert capture(tiny_model()).meta["longest"] is None
    with pytest.raises(UnsupportedModelError, match="another path for fewer than 9 tokens"):
        capture(Branches(8))
