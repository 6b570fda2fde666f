"""What only a CUDA device can show: the recorded step, no waiting for the device, and flat memory."""

import pytest
import torch
from conftest import cache_of, tiny_model

import ckv_compile
from ckv_compile import model as model_module
from ckv_compile.runtime import decode_loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SMALL = {"budget": 40, "interval": 8, "n_sink": 2, "n_recent": 6, "chunk_size": 8}
OPTIONS = {
    "greedy": {"do_sample": False},
    "all": {"do_sample": True, "temperature": 1.3, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2},
}


class Collect:
    """A streamer that keeps the tokens."""

    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens.extend(value.tolist())

    def end(self):
        pass


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_recorded_step_equals_the_eager_graph_over_compactions(rows, family, prompt):
    model, ids = tiny_model(family).cuda(), prompt(60, batch=rows, seed=1).cuda()
    turns = [ids, *prompt(30, batch=rows, seed=2).cuda().split(1, dim=1)]
    logits = []
    for mode in ("eager", "inductor"):
        ours = ckv_compile.transform(model, compile=mode, **SMALL)
        cache = ours.new_cache(rows)
        logits.append(torch.cat([ours(turn, past_key_values=cache).logits for turn in turns], dim=1))
        assert cache.state.position.tolist() == [90] * rows
    torch.testing.assert_close(*logits, rtol=0, atol=1e-3)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_loop_never_waits_for_the_device(options, prompt):
    """Steps, end-of-sequence check and streamer, in the mode in which torch raises on whatever waits."""
    ours, ids = ckv_compile.transform(tiny_model().cuda(), **SMALL), prompt(60).cuda()
    ours.generate(ids, max_new_tokens=3, eos_token_id=[200, 201], pad_token_id=0, **options)  # ends that never come
    ((step,),) = ours._steps.values()
    cache = ours._idle
    cache.reset()
    logits = ours(ids, past_key_values=cache).logits
    streamer = Collect()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            tokens = decode_loop(step, cache, ids, logits, step.sampler, 100, streamer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert streamer.tokens == tokens[0, 60:].tolist()
    assert cache.columns == 99


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_seed_gives_the_same_tokens_when_the_step_is_recorded_and_when_it_is_replayed(options, prompt):
    ours = ckv_compile.transform(tiny_model().cuda(), **SMALL)
    tokens = []
    for _ in range(3):
        torch.manual_seed(4)
        tokens.append(ours.generate(prompt(60).cuda(), max_new_tokens=40, **options))
    assert torch.equal(tokens[0], tokens[1])
    assert torch.equal(tokens[0], tokens[2])


def test_rows_that_end_early_in_calls_that_replay_one_recording(prompt):
    """Tokens of the eager loop on the CPU's terms, call after call: a replay reads ends and padding that still live."""
    model = tiny_model().cuda()
    ours = ckv_compile.transform(model, **SMALL)
    eager = ckv_compile.transform(model, compile="eager", **SMALL)
    ids, shown = prompt(50, batch=2).cuda(), torch.ones(2, 50, dtype=torch.int64).cuda()
    free = eager.generate(ids, attention_mask=shown, max_new_tokens=40)
    options = {"attention_mask": shown, "max_new_tokens": 40, "eos_token_id": int(free[0, 60]), "pad_token_id": 0}
    expected = eager.generate(ids, **options)
    for _ in range(3):
        assert torch.equal(ours.generate(ids, **options), expected)
        torch.full((10000,), 77, dtype=torch.int64, device="cuda")  # takes the place of whatever was freed
    out = eager.generate(ids, return_dict_in_generate=True, **options)
    length = out.sequences.shape[1]
    positions = []
    for row in out.sequences.tolist():
        end = row.index(options["eos_token_id"], 50) + 1 if options["eos_token_id"] in row[50:] else length
        positions.append(min(end, length - 1))
    assert cache_of(out).state.position.tolist() == positions


def test_a_loaded_package_is_recorded_and_gives_the_tokens_of_the_model(tmp_path, prompt):
    """Compiled ahead of time with its kernels inside; the second call replays what the first recorded."""
    ours, ids = ckv_compile.transform(tiny_model().cuda(), compile="eager", **SMALL), prompt(60).cuda()
    expected = ours.generate(ids, max_new_tokens=30, do_sample=False)
    ours.save_pretrained(tmp_path / "out", aot=[1])
    loaded = ckv_compile.load(tmp_path / "out", compile="aot")
    for _ in range(2):
        assert torch.equal(loaded.generate(ids, max_new_tokens=30, do_sample=False), expected)
    ((step,),) = loaded._steps.values()
    assert step._replay is not None


def test_the_backend_recorded_by_inductor_gives_the_tokens_of_transform(prompt):
    torch._dynamo.reset()
    model, ids = tiny_model().cuda(), prompt(60).cuda()
    greedy = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 30, "do_sample": False}
    expected = ckv_compile.transform(model, compile="eager", **SMALL).generate(ids, **greedy)
    cache = ckv_compile.cache_for(model, **SMALL)
    model.forward = torch.compile(model.forward, backend="ckv", mode="reduce-overhead")
    for _ in range(2):
        cache.reset()
        assert torch.equal(model.generate(ids, **{model_module._CACHE_NAME: cache}, **greedy), expected)


def test_memory_is_flat_over_steps(prompt):
    ours = ckv_compile.transform(tiny_model().cuda(), **SMALL)
    cache = ours.new_cache()
    ours(prompt(60).cuda(), past_key_values=cache)
    token = torch.ones(1, 1, dtype=torch.int64, device="cuda")
    ours(token, past_key_values=cache)
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        ours(token, past_key_values=cache)
    assert torch.cuda.memory_allocated() == before
    assert int(cache.state.degree.sum()) == 161 * 3 * 3


def test_release_gives_the_memory_back(prompt):
    ours = ckv_compile.transform(tiny_model().cuda(), **SMALL)
    ours.generate(prompt(9).cuda(), max_new_tokens=3)
    kept = torch.cuda.memory_allocated()
    ours.release()
    assert torch.cuda.memory_allocated() < kept
