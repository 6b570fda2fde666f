"""The torch.compile backend: original models in transformers' own loop give the tokens of `transform`."""

import copy
import inspect
import math
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.utils import run_and_get_code
from transformers import CompileConfig
from transformers.models.llama.modeling_llama import LlamaAttention

import ckv_compile
from ckv_compile import ConfigError, InputError, UnsupportedModelError
from ckv_compile import model as model_module

OPTIONS = {"budget": 24, "interval": 8, "n_sink": 2, "n_recent": 8, "chunk_size": 8}
GREEDY = {"do_sample": False, "max_new_tokens": 25, "pad_token_id": 0}
CACHE = model_module._CACHE_NAME


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def model_of(family="llama"):
    """In float64: a batch is prefilled at once here and row by row in `transform`, and rounding may decide a merge."""
    return tiny_model(family).double()


def compiled(model, mode="eager", **options):
    model.forward = torch.compile(model.forward, backend="ckv", mode=mode, **options)
    return model


def padded(prompt, *padding, length=60):
    ids = prompt(length, batch=len(padding))
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        ids[row, :count], mask[row, :count] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def test_it_is_listed_by_its_entry_point():
    assert "ckv" in torch.compiler.list_backends()


@pytest.mark.parametrize("family", ["llama", "smollm2", "qwen3", "gemma3"])
def test_transformers_own_loop_gives_the_tokens_of_transform(family, prompt):
    model, inputs = model_of(family), padded(prompt, 0, 33)  # the short row is within the budget
    expected = ckv_compile.transform(model, compile="eager", **OPTIONS).generate(**inputs, **GREEDY)
    cache = ckv_compile.cache_for(model, batch_size=2, **OPTIONS)
    found = compiled(model).generate(**inputs, **{CACHE: cache}, **GREEDY)
    assert torch.equal(found, expected)
    assert cache.state.position.tolist() == [84, 51]
    assert cache.columns == 84
    assert (cache.state.fill < cache.capacity).all()


def test_slots_of_8_bits_give_the_tokens_of_transform(prompt):
    model, inputs, options = tiny_model(), {"input_ids": prompt(60)}, OPTIONS | {"cache_dtype": "int8"}
    expected = ckv_compile.transform(model, compile="eager", **options).generate(**inputs, **GREEDY)
    cache = ckv_compile.cache_for(model, **options)
    assert cache.state.keys.dtype == torch.int8
    found = compiled(model).generate(**inputs, **{CACHE: cache}, **GREEDY)
    assert torch.equal(found, expected)


def test_a_layer_with_a_window_cannot_be_light():
    with pytest.raises(ConfigError, match="layer 0 has a sliding window, which stays as it is"):
        ckv_compile.cache_for(model_of("gemma3"), **(OPTIONS | {"budget": 100, "light_layers": [0]}))


def test_light_layers_give_the_tokens_of_transform(prompt):
    light = {"light_layers": [1], "light_share": 0.6, "budget": 40}
    model, inputs = model_of(), padded(prompt, 0, 33)
    expected = ckv_compile.transform(model, compile="eager", **(OPTIONS | light)).generate(**inputs, **GREEDY)
    cache = ckv_compile.cache_for(model, batch_size=2, **(OPTIONS | light))
    whole = inputs | {"position_ids": (inputs["attention_mask"].cumsum(dim=1) - 1).clamp(min=0), CACHE: cache}
    forward = torch.compile(model.forward, backend="ckv", options={"light_layers": [2]})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="give budget and light_layers together"):
        forward(**whole)
    forward = torch.compile(model.forward, backend="ckv", options=light | {"light_layers": [2]})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="do not make the cache that it got"):
        forward(**whole)
    model.forward = torch.compile(model.forward, backend="ckv", options=light)
    found = model.generate(**inputs, **{CACHE: cache}, **GREEDY)
    assert torch.equal(found, expected)
    assert (cache.state.light_fill != cache.state.fill).all()


@pytest.mark.parametrize("dynamic", [True, False, None])
def test_prompts_of_several_lengths_and_a_conversation(dynamic, prompt):
    model = model_of()
    ours = ckv_compile.transform(model, compile="eager", **OPTIONS)
    cache, other = ckv_compile.cache_for(model, **OPTIONS), ours.new_cache()
    compiled(model, dynamic=dynamic)
    for length in (50, 1, 33, 70):
        cache.reset()
        inputs = padded(prompt, 0, length=length)
        found = model.generate(**inputs, **{CACHE: cache}, **GREEDY)
        assert torch.equal(found, ours.generate(**inputs, **GREEDY)), length
    cache.reset()
    text = prompt(40)
    for turn in range(2):
        text = torch.cat([text, prompt(9, seed=turn)], dim=1)
        inputs = {"input_ids": text, "attention_mask": torch.ones_like(text)}
        found = model.generate(**inputs, **{CACHE: cache}, **GREEDY)
        text = ours.generate(**inputs, past_key_values=other, **GREEDY)
        assert torch.equal(found, text)
    torch.testing.assert_close(cache.state, other.state)


def test_batch_sizes_models_and_forks_do_not_mix(prompt):
    models = [model_of(), model_of("qwen2")]
    ours = [ckv_compile.transform(model, compile="eager", **OPTIONS) for model in models]
    caches = {
        (i, rows): ckv_compile.cache_for(model, batch_size=rows, **OPTIONS)
        for i, model in enumerate(models)
        for rows in (1, 2)[: 2 - i]
    }
    for model in models:
        compiled(model)
    forks, tokens = {}, {}

    def advance(cache, i, ids):
        positions = torch.arange(cache.columns, cache.columns + ids.shape[1]).expand(len(ids), -1)
        return models[i](input_ids=ids, position_ids=positions, **{CACHE: cache}).logits[:, -1:].argmax(dim=-1)

    for (i, rows), cache in caches.items():
        ids = prompt(40, batch=rows)
        tokens[i, rows] = torch.cat([ids, advance(cache, i, ids)], dim=1)
        forks[i, rows] = cache.fork()
    for _ in range(9):  # with a compaction
        for (i, rows), fork in forks.items():  # they take turns
            given = tokens[i, rows]
            tokens[i, rows] = torch.cat([given, advance(fork, i, given[:, -1:])], dim=1)
    for (i, rows), found in tokens.items():
        expected = ours[i].generate(prompt(40, batch=rows), do_sample=False, max_new_tokens=10)
        assert torch.equal(found, expected)
        assert caches[i, rows].columns == 40


@pytest.mark.parametrize(("family", "mode"), [("llama", "reduce-overhead"), ("gemma3", "eager")])
def test_generation_compiles_the_step_itself(family, mode, prompt):
    """By `compile_config`, the prompt runs in the forward as it is, and only the step of one token is compiled.

    So no queries of the prompt are known, and all that they would choose is left out here.
    """
    # Older versions of transformers do not tell a cache what is padding; more rows are refused there.
    rows = (33, 0) if "kwargs=kwargs" in inspect.getsource(LlamaAttention.forward) else (0,)
    model, inputs = model_of(family), padded(prompt, *rows)
    compile_config = CompileConfig(backend="ckv", mode=mode)
    compile_config._compile_all_devices = True  # without it, transformers compiles on accelerators only
    options = OPTIONS | {"exact": 0.0}
    cache = ckv_compile.cache_for(model, batch_size=len(rows), **options)
    found = model.generate(**inputs, **{CACHE: cache}, compile_config=compile_config, **GREEDY)
    expected = ckv_compile.transform(model, compile="eager", **options).generate(**inputs, **GREEDY)
    assert torch.equal(found, expected)


class Decoder(nn.Module):
    """A decoder that knows nothing of transformers."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, 32), nn.Embedding(90, 32)
        self.qkv = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids, position_ids, cache=None):
        x = self.tokens(input_ids) + self.positions(position_ids)
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in qkv(x).split((32, 16, 16), dim=-1))
            if cache is not None:
                k, v = cache.update(k, v, layer)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + out(attended.transpose(1, 2).flatten(2))
        return self.head(x)


def decoder():
    torch.manual_seed(0)
    return Decoder().double().eval()


def test_a_decoder_of_plain_pytorch():
    model = decoder()
    ids = torch.arange(1, 51)[None]  # 0 is padding
    expected = ckv_compile.transform(model, compile="eager", **OPTIONS).generate(ids, **GREEDY)
    cache = ckv_compile.cache_for(model, **OPTIONS)
    forward = torch.compile(model, backend="ckv", mode="eager")
    token, tokens = ids, [ids]
    for step in range(25):
        positions = torch.arange(50)[None] if step == 0 else torch.tensor([[49 + step]])
        token = forward(token, positions, cache)[:, -1:].argmax(dim=-1)
        tokens.append(token)
    assert torch.equal(torch.cat(tokens, dim=1), expected)
    with pytest.raises(InputError, match=r"94 tokens in a row; this model has positions for 90"):
        forward(ids[:, :20], torch.arange(74, 94)[None], cache)
    assert cache.columns == 74


def test_all_logits_of_a_prompt_are_returned(prompt):
    model, ids = model_of(), prompt(20)
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits
    cache = ckv_compile.cache_for(model, **OPTIONS)
    found = compiled(model)(input_ids=ids, position_ids=torch.arange(20)[None], **{CACHE: cache}).logits
    torch.testing.assert_close(found, expected)


def test_the_compiled_step_copies_no_cache(prompt):
    """As in `transform`: Inductor's code hands the inputs to the ops, and allocates nothing as large as a layer."""
    model = tiny_model()
    cache = ckv_compile.cache_for(model, **OPTIONS)
    forward = torch.compile(model.forward, backend="ckv")
    arguments = {"position_ids": torch.tensor([[0]]), CACHE: cache}
    _, (code,) = run_and_get_code(lambda: forward(input_ids=torch.tensor([[1]]), **arguments))
    calls = re.findall(r"ckv\.cached_attention\.default\(.*?\), (arg\d+_1, arg\d+_1, arg\d+_1), arg\d+_1, arg", code)
    assert len(calls) == 3
    assert len(set(calls)) == 1
    assert re.findall(r"ckv\.compact_\.default\((arg\d+_1, arg\d+_1, arg\d+_1),", code) == calls[:1]
    allocated = [eval(shape) for shape in re.findall(r"= empty_strided_cpu\((\(.*?\)),", code)]
    assert max(map(math.prod, allocated)) < cache.state.keys[0, 0].numel()
    assert "extern_kernels.mm" not in code  # linear layers of one row are reductions


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgett": 24}, "unknown option 'budgett': did you mean 'budget'"),
        ({"budget": 32}, r"options=\{'budget': 32\} of the backend, but the cache was made with budget=24"),
        ({"budget": 0.5}, r"options=\{'budget': 0.5\}"),
        ({"interval": 10}, r"the cache was made with interval=8"),
        ({"cache_dtype": "int8"}, r"the cache was made with cache_dtype='auto'"),
        ({"prefill_chunk": 8}, r"options prefill_chunk are not of the backend"),
    ],
    ids=["misspelt", "other-budget", "fraction", "other-interval", "other-dtype", "of-transform"],
)
def test_options_must_be_those_of_the_cache(options, message, prompt):
    model = model_of()
    cache = ckv_compile.cache_for(model, **OPTIONS)
    model.forward = torch.compile(model.forward, backend="ckv", options=options)
    with pytest.raises(BackendCompilerFailed, match=message):
        model.generate(prompt(9), **{CACHE: cache}, **GREEDY)
    assert not cache.columns


def test_an_unknown_mode(prompt):
    model = decoder()
    with pytest.raises(BackendCompilerFailed, match=r"mode='fast': choose one of None, 'default'"):
        torch.compile(model, backend="ckv", mode="fast")(torch.tensor([[1]]), torch.tensor([[0]]))


def test_a_graph_without_a_cache():
    model, ids, positions = decoder(), torch.tensor([[1, 2]]), torch.tensor([[0, 1]])
    with pytest.raises(BackendCompilerFailed, match=r"attention has no ClusteredCache: make one by ckv_compile.c"):
        torch.compile(model, backend="ckv")(ids, positions)
    with pytest.raises(BackendCompilerFailed, match="without attention and without a ClusteredCache"):
        torch.compile(nn.Linear(4, 4), backend="ckv")(torch.ones(1, 4))


class Broken(Decoder):
    """With a graph break behind its first layer."""

    def forward(self, input_ids, position_ids, cache=None):
        x = self.tokens(input_ids)
        for layer in range(2):
            k = x[:, None, :, :16].unflatten(-1, (2, 8))[:, 0].transpose(1, 2)
            if cache is not None:
                k, _ = cache.update(k, k, layer)
                torch._dynamo.graph_break()
            x = x + F.scaled_dot_product_attention(k, k, k, is_causal=True).transpose(1, 2).flatten(2).repeat(1, 1, 2)
        return self.head(x)


def test_a_graph_break_inside_the_model():
    cache = ckv_compile.cache_for(decoder(), **OPTIONS)
    with pytest.raises(BackendCompilerFailed, match=r"updates 1 of the cache's 2 layers: the forward has a graph"):
        torch.compile(Broken().double(), backend="ckv")(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), cache)


def test_attention_that_is_not_sdpa(prompt):
    model = tiny_model("gemma2")
    cache = ckv_compile.cache_for(model, **OPTIONS)
    with pytest.raises(BackendCompilerFailed, match="found 0 calls of scaled_dot_product_attention for 3 layers"):
        compiled(model).generate(prompt(9), **{CACHE: cache}, **GREEDY)


class Wide(Decoder):
    """Whose tokens see those behind them."""

    def forward(self, input_ids, position_ids, cache=None):
        x = self.tokens(input_ids)
        for layer in range(2):
            k = x[:, :, :16].unflatten(-1, (2, 8)).transpose(1, 2)
            k, _ = cache.update(k, k, layer)
            x = x + F.scaled_dot_product_attention(k, k, k).transpose(1, 2).flatten(2).repeat(1, 1, 2)
        return self.head(x)


def test_attention_that_is_not_causal():
    cache = ckv_compile.cache_for(decoder(), **OPTIONS)
    with pytest.raises(BackendCompilerFailed, match="attention without a mask: every token sees the later ones"):
        torch.compile(Wide().double(), backend="ckv")(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), cache)


def test_the_cache_without_the_backend(prompt):
    """A prompt of a forward that is not compiled fills the cache; a step of it is refused, and the cache kept."""
    model, ids, options = model_of(), prompt(60), OPTIONS | {"exact": 0.0}
    cache = ckv_compile.cache_for(model, **options)
    with pytest.raises(InputError, match=r"a model that is not compiled cannot continue a Clust.*backend=\"ckv"):
        model.generate(ids, **{CACHE: cache}, **GREEDY)
    assert cache.columns == 60
    expected = ckv_compile.transform(model, compile="eager", **options)(ids)
    state = (expected.get("cache") or expected["past_key_values"]).state
    unseen = {"queries": state.queries, "last_queries": state.last_queries}
    torch.testing.assert_close(cache.state._replace(**unseen), state)
    assert not any(getattr(cache.state, name).any() for name in unseen), "which nobody showed to the cache"


def test_another_backend(prompt):
    model = decoder()
    cache = ckv_compile.cache_for(model, **OPTIONS)
    with pytest.raises(InputError, match='in a compiled graph that the backend "ckv" has not seen'):
        torch.compile(model, backend="aot_eager")(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), cache)
    assert not cache.columns


def test_a_cache_of_a_transformed_model_is_not_for_the_original(prompt):
    model = tiny_model()
    cache = ckv_compile.transform(model, compile="eager", **OPTIONS).new_cache()
    with pytest.raises(InputError, match=r"make one by ckv_compile.cache_for"):
        model.generate(prompt(9), **{CACHE: cache}, **GREEDY)


def test_positions_and_masks_that_do_not_continue_the_cache(prompt):
    model, ids = model_of(), prompt(12, batch=2)
    cache = ckv_compile.cache_for(model, batch_size=2, **OPTIONS)
    positions, mask = torch.arange(12).repeat(2, 1), torch.ones(2, 12, dtype=torch.int64)
    compiled(model)

    def call(**changes):
        given = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, CACHE: cache}
        return model(**(given | changes))

    with pytest.raises(InputError, match="positions must go on, behind padding at the left"):
        call(position_ids=positions + 3)
    hidden = mask.clone()
    hidden[0, :4] = 0
    with pytest.raises(InputError, match="hides other tokens than the padding"):
        call(attention_mask=hidden)
    hidden[0] = mask[0]
    hidden[0, -1] = 0
    with pytest.raises(InputError, match="hides tokens that are not at the left"):
        call(attention_mask=hidden)
    soft = torch.full((2, 1, 12, 12), -torch.inf, dtype=torch.float64).triu(1)
    soft[0, :, 5:, 0] = -8.0
    with pytest.raises(InputError, match="hides other tokens than the padding"):
        call(attention_mask=soft)
    with pytest.raises(InputError, match="token ids from 0 to 999; this model's are 0 to 127"):
        call(input_ids=ids.clone().fill_(0).index_fill_(1, torch.tensor([3]), 999))
    assert cache.columns == 0
    call()
    step = {"input_ids": ids[:, :1], "position_ids": torch.full((2, 1), 12)}
    with pytest.raises(InputError, match="positions must go on"):
        call(**step | {"position_ids": positions[:, :1], "attention_mask": None})
    with pytest.raises(InputError, match="token ids from 999 to 999"):
        call(**step | {"input_ids": torch.full((2, 1), 999), "attention_mask": None})
    hidden = torch.ones(2, 13, dtype=torch.int64)
    hidden[0, 3:6] = 0
    with pytest.raises(InputError, match=r"shows .* earlier tokens"):
        call(**step, attention_mask=hidden)
    with pytest.raises(InputError, match="for 2 rows with 12 columns in the cache and 1 new ones"):
        call(**step, attention_mask=torch.ones(2, 7, dtype=torch.int64))
    call(**step, attention_mask=None)
    assert cache.columns == 13


def test_a_batch_without_positions(prompt):
    """All rows would get those of the longest."""
    model = model_of()
    cache = ckv_compile.cache_for(model, batch_size=2, **OPTIONS)
    compiled(model)(**padded(prompt, 0, 15, length=40) | {"position_ids": POSITIONS_OF_PADDED}, **{CACHE: cache})
    with pytest.raises(BackendCompilerFailed, match="a batch needs position_ids"):
        model(input_ids=torch.tensor([[1], [1]]), **{CACHE: cache})
    assert cache.state.position.tolist() == [40, 25]


POSITIONS_OF_PADDED = torch.stack([torch.arange(40), torch.cat([torch.zeros(15), torch.arange(25)]).long()])


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"rows": 2}, "new tokens of 1 rows, .*, for a cache of 2 rows"), ({"dtype": torch.float32}, "torch.float32")],
    ids=["rows", "dtype"],
)
def test_a_cache_of_other_rows_or_another_dtype(changes, message):
    model = decoder()
    cache = ckv_compile.cache_for(decoder().to(changes.get("dtype")), batch_size=changes.get("rows", 1), **OPTIONS)
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(model, backend="ckv")(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), cache)
    assert not cache.columns


class Backwards(Decoder):
    """Which attends in another order than it updates its cache."""

    def forward(self, input_ids, position_ids, cache=None):
        x = self.tokens(input_ids)
        new = [x[:, :, i : i + 16].unflatten(-1, (2, 8)).transpose(1, 2) for i in (0, 16)]
        new = [cache.update(k, k, layer)[0] for layer, k in enumerate(new)]
        for k in reversed(new):
            x = x + F.scaled_dot_product_attention(k, k, k, is_causal=True).transpose(1, 2).flatten(2).repeat(1, 1, 2)
        return self.head(x)


def test_layers_that_attend_in_another_order():
    cache = ckv_compile.cache_for(decoder(), **OPTIONS)
    with pytest.raises(BackendCompilerFailed, match="expected keys and values of the next layer of its kind"):
        torch.compile(Backwards().double(), backend="ckv")(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), cache)


def test_padding_does_not_count_as_positions():
    """60 columns of which 40 are tokens, for a model of 90 positions, and then 49 steps' worth more."""
    model = decoder()
    cache = ckv_compile.cache_for(model, **OPTIONS)
    positions = torch.cat([torch.zeros(60), torch.arange(40)]).long()[None]
    torch.compile(model, backend="ckv")(torch.ones(1, 100, dtype=torch.int64), positions, cache)
    assert cache.state.position.tolist() == [40]


def test_copies_are_forks_and_pickles_are_refused():
    cache = ckv_compile.cache_for(decoder(), **OPTIONS)
    for other in (copy.copy(cache), copy.deepcopy(cache)):
        assert type(cache).of(other.state.position) is other
        assert other.state.keys.data_ptr() != cache.state.keys.data_ptr()
    with pytest.raises(InputError, match="cannot be pickled"):
        pickle.dumps(cache)


def test_quantised_weights_are_refused():
    quantize_ = pytest.importorskip("torchao.quantization").quantize_
    model = tiny_model()
    quantize_(model, pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())
    with pytest.raises(UnsupportedModelError, match="quantised weights"):
        ckv_compile.cache_for(model, **OPTIONS)


def test_bad_arguments_of_cache_for():
    with pytest.raises(ConfigError, match="prefill_chunk=8 is of transform"):
        ckv_compile.cache_for(decoder(), prefill_chunk=8, **OPTIONS)
    for bad in (True, 0, 1.5, "2"):
        with pytest.raises(InputError, match="pass an int of at least 1"):
            ckv_compile.cache_for(decoder(), batch_size=bad, **OPTIONS)
    with pytest.raises(ConfigError, match="unknown option 'budgett'"):
        ckv_compile.cache_for(tiny_model(), budgett=3)
    with pytest.raises(InputError, match="a batch of 9 rows"):
        ckv_compile.cache_for(tiny_model(), batch_size=9, **OPTIONS)
    with pytest.raises(UnsupportedModelError, match="got Linear"):
        ckv_compile.cache_for(nn.Linear(2, 2), **OPTIONS)
