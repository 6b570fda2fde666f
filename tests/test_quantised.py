"""Weight-only quantised models of torchao: the same tokens and logits as the quantised model run by transformers."""

import pytest
import torch
from ckv_compile.passes.reduce_linear import reduce_linear
from conftest import tiny_model
from torch import nn
from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)

import ckv_compile
from ckv_compile.capture import capture
from ckv_compile.errors import PassError
from ckv_compile.roofline import weight_bytes

PLAIN = {"set_inductor_config": False}  # else torchao changes Inductor's configuration of the whole process
CONFIGS = {
    "int8": Int8WeightOnlyConfig(**PLAIN),
    "int8-groups": Int8WeightOnlyConfig(granularity=PerGroup(32), **PLAIN),
    "int4-groups": IntxWeightOnlyConfig(torch.int4, granularity=PerGroup(32)),
    "int4-packed": PrototypeInt4WeightOnlyConfig(group_size=32, **PLAIN),
    "float8": Float8WeightOnlyConfig(**PLAIN),
}


def quantised(name, dtype=torch.float32, family="llama", **changes):
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = tiny_model(family, **(shape | {"num_key_value_heads": 2, "head_dim": 16} | changes)).to(dtype)
    quantize_(model, CONFIGS[name])
    return model


def check(model, ours, ids, tolerance):
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    expected, found = model.generate(ids, **options), ours.generate(ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(ours.generate(ids, max_new_tokens=8, do_sample=False), expected.sequences)  # by our own loop
    exact, error = torch.stack(expected.logits), torch.stack(found.logits) - torch.stack(expected.logits)
    assert error.abs().max() < tolerance * exact.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_quantised_model_decodes(name, prompt):
    model = quantised(name)
    check(model, ckv_compile.transform(model, budget=128, compile="eager"), prompt(12), 1e-5)


@pytest.mark.parametrize("name", ["int8", "int4-packed"])
def test_a_quantised_model_decodes_compiled(name, prompt):
    model = quantised(name, family="qwen2", num_hidden_layers=1)  # its projections have biases
    check(model, ckv_compile.transform(model, budget=128), prompt(12), 1e-5)


def test_a_batch_of_a_quantised_model_decodes(prompt):
    model = quantised("int8")
    check(model, ckv_compile.transform(model, budget=128, compile="eager"), prompt(12, batch=3), 1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_graph_holds_the_quantised_weights_and_nothing_else(name):
    model = quantised(name)
    graph = capture(model)
    parameters = {parameter.data_ptr(): parameter for parameter in graph.parameters()}
    assert all(type(parameter) is nn.Parameter for parameter in parameters.values())
    assert model.lm_head.weight.qdata.data_ptr() in parameters
    embedding = model.get_input_embeddings().weight.nbytes
    assert sum(parameter.nbytes for parameter in parameters.values()) <= weight_bytes(model) + embedding


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_times_int8_becomes_a_reduction_over_the_integers(bias, dtype):
    linear = nn.Linear(64, 32, bias=bias, dtype=dtype)
    quantize_(linear, CONFIGS["int8"])
    linear.requires_grad_(False)
    x = torch.randn(1, 1, 64, dtype=dtype)
    graph = torch.export.export(linear, (x,), strict=False).module(check_guards=False)
    assert reduce_linear(graph) == 1
    graph.recompile()
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    (total,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    _, cast = total.all_input_nodes[0].all_input_nodes
    assert cast.all_input_nodes[0].all_input_nodes[0].meta["val"].dtype == torch.int8
    torch.testing.assert_close(graph(x), linear(x))


def test_quantised_activations_are_refused():
    model = tiny_model(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
    quantize_(model, Int8DynamicActivationInt8WeightConfig(**PLAIN))
    with pytest.raises(PassError, match="logits made by a linear head"):
        ckv_compile.transform(model, budget=128, compile="eager")


def test_weight_bytes_counts_what_is_stored():
    model = quantised("int8")
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    norms = sum(parameter.nbytes for name, parameter in model.named_parameters() if "norm" in name)
    per_linear = [linear.weight.numel() + (4 + 1) * linear.weight.shape[0] for linear in linears]  # scale, zero point
    assert weight_bytes(model) == sum(per_linear) + norms
