"""A cache as a conversation: turns, forks, files, and what can be taken back; with and without sliding windows."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import cache_of, tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckv_compile
from ckv_compile import slots

SMALL = {"budget": 40, "interval": 16, "n_sink": 2, "n_recent": 6, "chunk_size": 16}
LIGHT = {"light_layers": (0, 2), "light_share": 0.6}
KINDS = {  # family and options
    "llama": ("llama", {}),
    "gemma3": ("gemma3", {}),
    "light": ("llama", LIGHT),
    "int8": ("llama", LIGHT | {"cache_dtype": "int8"}),
}
ALL = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def transformed(kind="llama", **options):
    family, own = KINDS[kind]
    return ckv_compile.transform(tiny_model(family), compile="eager", **(SMALL | own | options))


def after(ours, *turns):
    cache = ours.new_cache()
    for turn in turns:
        ours(turn, past_key_values=cache)
    return cache


def assert_same(one, other, queries=True):
    assert one.columns == other.columns
    for name, mine, yours in zip(one.state._fields, one.state, other.state, strict=True):
        if name in ("keys", "values", "light_keys", "light_values"):  # an empty slot may hold anything
            taken = slots.weights(mine, one.state.light_degree if "light" in name else one.state.degree) > 0
            mine, yours = mine.where(taken[..., None], 0), yours.where(taken[..., None], 0)
        if queries or "queries" not in name:
            assert torch.equal(mine, yours), name


# -------------------------------------------------------------------------------------------------------------- turns


@ALL
def test_turns_keep_true_positions_whatever_was_compacted(kind, prompt):
    ours = transformed(kind)
    cache = ours.new_cache()
    seen = 0
    for steps in (100, 1, 30, 1, 1, 60, 2):  # long and short turns, over compactions
        ours(prompt(steps, seed=seen), past_key_values=cache)
        seen += steps
        assert cache.get_seq_length() == int(cache.state.position) == seen
        for degree in (cache.state.degree, cache.state.light_degree):
            assert (slots.weights(cache.state.keys, degree).sum(dim=-1) == seen).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int8"])
def test_within_the_budget_a_conversation_is_transformers_own(kind, prompt):
    model, ours = tiny_model(KINDS[kind][0]), transformed(kind, budget=400)
    cache, said = ours.new_cache(), torch.zeros(1, 0, dtype=torch.int64)
    for turn in (prompt(50, seed=1), prompt(3, seed=2), prompt(40, seed=3)):
        ids = torch.cat([said, turn], dim=1)
        said = ours.generate(ids, past_key_values=cache, max_new_tokens=9, do_sample=False)
        assert torch.equal(said, model.generate(ids, max_new_tokens=9, do_sample=False))
        assert cache.get_seq_length() == said.shape[1] - 1


# -------------------------------------------------------------------------------------------------------------- forks


@ALL
def test_forks_go_on_by_themselves(kind, prompt):
    ours = transformed(kind)
    base = after(ours, prompt(100))
    fork = base.fork()
    other = ours(prompt(30, seed=1), past_key_values=fork).logits
    assert_same(base, after(ours, prompt(100)))
    assert torch.equal(other, ours(prompt(30, seed=1), past_key_values=base).logits)
    assert_same(base, fork)


def test_a_fork_made_in_inference_mode_can_go_on_outside_of_it(prompt):
    ours = transformed()
    with torch.inference_mode():
        fork = after(ours, prompt(100)).fork()
    ours(prompt(20), past_key_values=fork)


# -------------------------------------------------------------------------------------------------------------- files

ELSEWHERE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from conftest import tiny_model
import ckv_compile
ours = ckv_compile.transform(tiny_model(sys.argv[2]), compile="eager", **eval(sys.argv[3]))
cache = ours.load_cache(sys.argv[4])
logits = ours(torch.tensor([eval(sys.argv[5])]), past_key_values=cache).logits
print(cache.get_seq_length(), int(cache.state.position), logits.double().abs().sum().item().hex())
"""


@ALL
def test_a_saved_conversation_goes_on_in_another_process(kind, prompt, tmp_path):
    ours, turn = transformed(kind), prompt(12, seed=5)
    cache, file = after(ours, prompt(100), prompt(1)), tmp_path / "cache.safetensors"
    ours.save_cache(cache, file)
    assert os.listdir(tmp_path) == [file.name]
    for name, fill in (("keys", cache.state.fill), ("light_keys", cache.state.light_fill)):
        assert load_file(file)[name].shape[3] == int(fill), "used slots alone"
    family, own = KINDS[kind]
    arguments = [str(Path(__file__).parent), family, repr(SMALL | own), str(file), repr(turn[0].tolist())]
    run = subprocess.run([sys.executable, "-c", ELSEWHERE, *arguments], capture_output=True, text=True, check=True)
    logits = ours(turn, past_key_values=cache).logits
    assert run.stdout.split() == ["113", "113", logits.double().abs().sum().item().hex()]


@pytest.mark.parametrize("windows", [0, 2, 3])
def test_a_loaded_cache_is_the_saved_one_bit_for_bit(windows, prompt, tmp_path):
    kinds = ["sliding_attention"] * windows + ["full_attention"] * (3 - windows)
    ours = ckv_compile.transform(tiny_model("gemma3", layer_types=kinds), compile="eager", **SMALL)
    cache = ours.new_cache(2)
    mask = torch.ones(2, 70, dtype=torch.int64)
    mask[0, :9] = 0
    ours(prompt(70, batch=2), attention_mask=mask, past_key_values=cache)
    ours.save_cache(cache, tmp_path / "cache")
    assert_same(ours.load_cache(tmp_path / "cache"), cache)


def test_files_that_do_not_fit_are_refused(prompt, tmp_path):
    ours, file = transformed(), tmp_path / "cache"
    cache = after(ours, prompt(60))
    ours.save_cache(cache, file)
    with pytest.raises(ckv_compile.InputError, match=r"interval=16 \(here 8\)|capacity=56 \(here 48\)"):
        transformed(interval=8).load_cache(file)
    light, moved = transformed("light"), transformed("light", light_layers=(0, 1))
    light.save_cache(after(light, prompt(60)), tmp_path / "light")
    with pytest.raises(ckv_compile.InputError, match=r"light_layers=\[0, 2\] \(here \[0, 1\]\)"):
        moved.load_cache(tmp_path / "light")
    with pytest.raises(ckv_compile.InputError, match=r"cache_dtype=auto \(here int8\)"):
        transformed("int8").load_cache(tmp_path / "light")
    with pytest.raises(ckv_compile.InputError, match="a cache of another model or config"):
        moved(prompt(5), past_key_values=light.new_cache())
    one_number, one_swap, other_angles = tiny_model(), tiny_model(), tiny_model(rope_theta=5000.0)
    with torch.no_grad():
        one_number.model.layers[1].mlp.down_proj.weight[3, 7] += 1e-6
        one_swap.model.embed_tokens.weight[:2] = one_swap.model.embed_tokens.weight[:2].flip(0)
    for other in (one_number, one_swap, other_angles):
        with pytest.raises(ckv_compile.InputError, match="a model of other weights"):
            ckv_compile.transform(other, compile="eager", **SMALL).load_cache(file)
    with pytest.raises(ckv_compile.InputError, match="another model or config"):
        transformed("gemma3").save_cache(cache, file)
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ckv_compile.InputError, match="no whole safetensors file"):
        ours.load_cache(file)
    save_file({"keys": torch.zeros(1)}, file)
    with pytest.raises(ckv_compile.InputError, match="holds None, not 'ckv_compile cache 4'"):
        ours.load_cache(file)
    damaged = {"keys": lambda t: t[0, 0], "fill": lambda t: t + 100, "degree": lambda t: t.double(), "position": None}
    for name, change in damaged.items():
        ours.save_cache(cache, file)
        with safe_open(file, framework="pt") as whole:
            metadata, tensors = whole.metadata(), {key: whole.get_tensor(key) for key in cache.state._fields}
        tensors |= {name: change(tensors[name])} if change else {}
        save_file({key: tensor for key, tensor in tensors.items() if change or key != name}, file, metadata)
        with pytest.raises(ckv_compile.InputError, match="the file is damaged"):
            ours.load_cache(file)
    with pytest.raises(OSError, match="could not be written"):
        ours.save_cache(cache, tmp_path / "nowhere" / "cache")
    with pytest.raises(FileNotFoundError, match="there is no file"):
        ours.load_cache(tmp_path / "nowhere")


def test_an_interrupted_cache_is_neither_saved_nor_forked_nor_cropped(prompt, tmp_path):
    ours = transformed()
    cache = after(ours, prompt(20))
    cache.broken = True
    for action in (cache.fork, lambda: cache.crop(-1), lambda: ours.save_cache(cache, tmp_path / "cache")):
        with pytest.raises(ckv_compile.InputError, match="interrupted half-way"):
            action()
    assert not os.listdir(tmp_path)


# --------------------------------------------------------------------------------------------------------------- crop


@pytest.mark.parametrize(("family", "length"), [("llama", 30), ("gemma3", 19)])
def test_until_something_is_merged_all_tokens_can_be_taken_back(family, length, prompt):
    ours, ids = transformed(family), prompt(length)
    for kept in (0, 1, length - 1, length):
        cache = after(ours, ids)
        cache.crop(kept - length)
        assert cache.get_seq_length() == kept
        expected = after(ours, ids[:, :kept]) if kept else ours.new_cache()
        later = ours(prompt(40, seed=4), past_key_values=cache).logits
        torch.testing.assert_close(
            later, ours(prompt(40, seed=4), past_key_values=expected).logits, atol=1e-5, rtol=1e-5
        )
        assert (cache.state.degree.sum(dim=-1) == kept + 40).all()


def test_the_layers_that_keep_least_say_what_can_be_taken_back(prompt):
    ours = transformed("light")
    cache = after(ours, prompt(50))  # light layers are full at 40 slots, the others at 88
    assert (int(cache.state.fill), int(cache.state.light_fill)) == (50, 24)
    with pytest.raises(ckv_compile.InputError, match=f"only the last {SMALL['n_recent']} tokens can be taken back"):
        cache.crop(-SMALL["n_recent"] - 1)
    cache.crop(-SMALL["n_recent"])
    assert (int(cache.state.fill), int(cache.state.light_fill)) == (44, 18)
    for degree in (cache.state.degree, cache.state.light_degree):
        assert (degree.sum(dim=-1) == 44).all()


def test_after_a_compaction_the_recent_tokens_can_be_taken_back_and_no_more(prompt):
    """Exactly: a turn that is taken back leaves what was there before it."""
    ours = transformed()
    for tail in (0, 1, 9):  # tokens since the compaction
        cache = after(ours, prompt(100), *prompt(tail, seed=1).split(1, dim=1) if tail else ())
        assert int(cache.state.fill) == SMALL["budget"] + tail
        exact = SMALL["n_recent"] + tail
        with pytest.raises(ckv_compile.InputError, match=f"only the last {exact} tokens can be taken back"):
            cache.crop(-exact - 1)
        last = cache.state.degree[0, :, :, SMALL["budget"] + tail - exact : SMALL["budget"] + tail]
        assert (last == 1).all()
        cache.crop(-exact)
        assert cache.get_seq_length() == int(cache.state.position) == 100 - SMALL["n_recent"]
        assert (cache.state.degree.sum(dim=-1) == 100 - SMALL["n_recent"]).all()
        with pytest.raises(ckv_compile.InputError, match="only the last 0 tokens"):
            cache.crop(-1)


def test_a_turn_that_is_taken_back_leaves_the_cache_before_it(prompt):
    ours = transformed(exact=0.0)  # what its queries have left stays, and would choose other exact slots
    cache = after(ours, prompt(100))
    before = cache.fork()
    ours(prompt(8, seed=1), past_key_values=cache)
    cache.crop(-8)
    later, expected = (ours(prompt(30, seed=2), past_key_values=each).logits for each in (cache, before))
    assert torch.equal(later, expected)
    assert_same(cache, before, queries=False)


def test_what_cannot_be_taken_back_is_refused_and_nothing_changes(prompt):
    cache = after(transformed("gemma3"), prompt(21))
    before = cache.fork()
    with pytest.raises(ckv_compile.InputError, match=r"only the last 0 tokens .* have left a sliding window"):
        cache.crop(-1)
    with pytest.raises(ckv_compile.InputError, match=r"crop\(3\): pass minus the number"):
        cache.crop(3)
    cache.crop(0)
    assert_same(cache, before)
    ours = transformed()
    rows, mask = ours.new_cache(2), torch.ones(2, 20, dtype=torch.int64)
    mask[1, :4] = 0
    ours(prompt(20, batch=2), attention_mask=mask, past_key_values=rows)
    with pytest.raises(ckv_compile.InputError, match="the rows of this cache have padding"):
        rows.crop(-1)


def test_generate_hands_out_a_cache_that_can_be_forked_and_cropped(prompt):
    ours = transformed()
    output = ours.generate(prompt(30), max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    cache = cache_of(output)
    fork = cache.fork()
    cache.crop(-5)  # the answer, of which the last token was never fed back
    again = ours.generate(prompt(30), past_key_values=after(ours, prompt(29)), max_new_tokens=6, do_sample=False)
    assert torch.equal(again, output.sequences)
    assert (cache.get_seq_length(), fork.get_seq_length()) == (30, 35)
