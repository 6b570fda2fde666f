"""What users of KV-cache compression complain about: one test for each complaint, named by what holds here instead."""

import gc
import weakref

import pytest
import torch
from conftest import cache_of, tiny_model

import ckv_compile

SMALL = {"budget": 40, "interval": 16, "n_sink": 2, "n_recent": 6, "chunk_size": 16}


def transformed(family="llama", compile="eager", **options):
    return ckv_compile.transform(tiny_model(family), compile=compile, **(SMALL | options))


def run(ours, ids, tokens=40, **options):
    fixed = {"do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    return ours.generate(ids, max_new_tokens=tokens, **fixed, **({"attention_mask": torch.ones_like(ids)} | options))


def padded(prompt, *lengths):
    width = max(lengths)
    ids, mask = prompt(width, batch=len(lengths)), torch.ones(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, : width - length], mask[row, : width - length] = 0, 0
    return ids, mask


def assert_same_row(state, row, other, other_row, tolerance=0.0):
    """Two rows of caches hold the same in their used slots."""
    for name in ("fill", "position", "degree"):
        assert torch.equal(getattr(state, name)[row], getattr(other, name)[other_row])
    taken = (state.degree[row] > 0)[..., None]
    for name in ("keys", "values", "window_keys", "window_values"):
        mine, yours = getattr(state, name)[row], getattr(other, name)[other_row]
        if name in ("keys", "values"):
            mine, yours = mine.where(taken, 0), yours.where(taken, 0)
        torch.testing.assert_close(mine, yours, atol=tolerance, rtol=0)


# "Batch size 1 is assumed, and padding is ignored."


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_after_the_prompt_a_padded_row_of_a_batch_is_the_row_alone_bit_for_bit(family, prompt):
    ours = transformed(family)
    lengths = (100, 3, 64)
    ids, mask = padded(prompt, *lengths)
    together = ours(ids, attention_mask=mask)
    for row, length in enumerate(lengths):
        alone = ours(ids[row : row + 1, 100 - length :])
        assert torch.equal(together.logits[row], alone.logits[0])
        assert_same_row(cache_of(together).state, row, cache_of(alone).state, 0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_padded_row_of_a_batch_generates_what_it_does_alone(family, prompt):
    """Tokens and cache, over compactions, while rows end at different steps.

    In float64, where the products of one row and of several agree to 1e-12: in float32 they differ in the last bits,
    since BLAS takes another path.
    """
    ours = ckv_compile.transform(tiny_model(family).double(), compile="eager", **SMALL)
    lengths = (100, 3, 64)
    ids, mask = padded(prompt, *lengths)
    free = run(ours, ids, attention_mask=mask).sequences
    end = int(free[2, 110])  # row 2 ends there, if not before; the others where they happen to
    together = run(ours, ids, attention_mask=mask, eos_token_id=end)
    for row, length in enumerate(lengths):
        alone = run(ours, ids[row : row + 1, 100 - length :], eos_token_id=end)
        tokens = alone.sequences[0, length:]
        assert torch.equal(together.sequences[row, 100 : 100 + len(tokens)], tokens)
        assert not together.sequences[row, 100 + len(tokens) :].any(), "padding"
        if len(tokens) < together.sequences.shape[1] - 100:  # it has ended, and so took its last token
            position = int(cache_of(alone).state.position) + 1
        else:
            position = int(cache_of(alone).state.position)
            assert_same_row(cache_of(together).state, row, cache_of(alone).state, 0, 1e-9)
        assert int(cache_of(together).state.position[row]) == position
        assert (cache_of(together).state.degree[row].sum(dim=-1) == position).all()


# "The output of a row depends on its neighbours in the batch."


@pytest.mark.parametrize("compile", ["eager", "inductor"])
def test_a_row_is_the_same_bit_for_bit_whatever_its_neighbours_are(compile, prompt):
    ours = transformed("gemma3", compile)
    outputs = []
    for others in (1, 2):
        ids, mask = padded(prompt, 70, 90, 20)
        neighbours = prompt(90, batch=3, seed=others)
        ids[0], ids[2] = neighbours[0], neighbours[2]
        mask[0] = others - 1  # now all of it is padding but one token
        mask[0, -1] = 1
        outputs.append(run(ours, ids, attention_mask=mask, output_logits=True))
    one, other = outputs
    assert torch.equal(one.sequences[1], other.sequences[1])
    assert all(torch.equal(mine[1], yours[1]) for mine, yours in zip(one.logits, other.logits, strict=True))
    assert_same_row(cache_of(one).state, 1, cache_of(other).state, 1)


# "Only the first prompt is compressed"; "it crashes when the second prompt is shorter."


def test_every_prompt_is_compressed_the_second_shorter_or_longer_than_the_first(prompt):
    ours = transformed()
    for length in (200, 90, 300):
        state = cache_of(run(ours, prompt(length), 2)).state
        assert int(state.fill) == SMALL["budget"] + 1
        assert (state.degree.sum(dim=-1) == length + 1).all()
    assert run(ours, prompt(5), 4).sequences.shape == (1, 9)


# "State leaks between calls."


def test_a_call_leaves_nothing_for_the_next(prompt):
    ours = transformed()
    first = run(ours, prompt(100)).sequences
    run(ours, prompt(150, batch=3, seed=1))
    assert torch.equal(run(ours, prompt(100)).sequences, first)


# "Per-query-head caches lose what grouped heads save."


def test_the_cache_has_a_slot_for_each_kv_head_not_for_each_query_head(prompt):
    ours = transformed()
    assert cache_of(run(ours, prompt(30), 2)).state.keys.shape[2] == ours.config.num_key_value_heads == 3
    assert ours.config.num_attention_heads == 6


# "No memory is really freed"; "hidden caches hold memory after generate."


def test_no_cache_lives_on_after_generate(prompt):
    ours = transformed()
    cache = weakref.ref(cache_of(run(ours, prompt(100))))
    gc.collect()
    assert cache() is None


@pytest.mark.parametrize(("family", "windows"), [("llama", 0), ("gemma3", 2)])
def test_bytes_are_those_of_the_slots_and_the_windows_whatever_was_generated(family, windows, prompt):
    """Layers x KV heads x (slots x (K, V and a degree) and 2 + 8 * 2 queries), and exact windows of 20 tokens."""
    ours = transformed(family)
    dim = 16 if family == "gemma3" else 8
    expected = (3 - windows) * 3 * ((40 + 16) * (2 * dim * 4 + 4) + 18 * dim * 4) + windows * 3 * 20 * 2 * dim * 4
    for length in (10, 300):
        assert cache_of(run(ours, prompt(length), 60)).nbytes() == expected


def test_a_window_larger_than_the_budget_is_kept_exactly_and_said(prompt, caplog):
    ours = ckv_compile.transform(tiny_model("gemma3", sliding_window=70), compile="eager", **SMALL)
    assert "2 sliding-window layers keep all 70 tokens of their window, more than budget=40" in caplog.text
    assert ours.new_cache().state.window_keys.shape[3] == 70


# "Compression happens at prefill only, so that long generations overflow."


def test_a_generation_far_longer_than_the_budget_stays_within_it(prompt):
    state = cache_of(run(transformed(), prompt(5), 300)).state
    assert int(state.fill) < SMALL["budget"] + SMALL["interval"]
    assert int(state.position) == 304


# "Positions are wrong after compression: gibberish on long texts."


def test_positions_are_those_of_the_text_after_compression(prompt):
    """A graph that is asked for its positions gives those of the tokens, however few slots are in use."""
    ours = transformed()
    cache = cache_of(run(ours, prompt(200), 50))
    assert int(cache.state.position) == cache.get_seq_length() == 249
    assert int(cache.state.fill) < 60
    moved = cache.fork()
    moved.state.position.add_(1000)  # RoPE sees the position: elsewhere, the same tokens mean something else
    here, there = (ours(prompt(1), past_key_values=each).logits for each in (cache, moved))
    assert not torch.allclose(here, there, atol=1e-3)


# "Tiny prompts are garbled."


@pytest.mark.parametrize("length", [1, 2, 3])
def test_tiny_prompts_are_answered_as_by_the_model_itself(length, prompt):
    model = tiny_model()
    ours = transformed()
    expected = model.generate(prompt(length), max_new_tokens=40, do_sample=False)
    assert torch.equal(run(ours, prompt(length)).sequences, expected)


# "Ratios and token budgets are confused."


@pytest.mark.parametrize("budget", [1.0, 2.0, 0, 0.0, True, -3])
def test_a_budget_that_could_be_meant_either_way_is_refused(budget):
    with pytest.raises(ckv_compile.ConfigError, match="budget"):
        ckv_compile.CKVConfig(budget=budget)


def test_a_float_is_the_kept_share_and_an_int_a_number_of_slots():
    assert ckv_compile.CKVConfig(budget=0.25).resolve(4096).budget == 1024
    assert ckv_compile.CKVConfig(budget=1024).resolve(4096).budget == 1024


# "A larger max_new_tokens recompiles"; "it is wrong after compile unless warmed up". Whether it is slower than the full
# cache is for `make bench` to show, not for a test.


def test_a_larger_max_new_tokens_compiles_nothing_anew(prompt, monkeypatch):
    """With all guards kept, so that there is something that could recompile."""
    monkeypatch.setattr("ckv_compile.pipeline._no_guards", lambda guards: [True for _ in guards])
    ours = transformed(compile="inductor")
    torch._dynamo.utils.counters.clear()
    for tokens in (3, 30, 90):
        run(ours, prompt(20), tokens)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_first_compiled_call_is_right_without_a_warm_up(prompt):
    expected = run(transformed(), prompt(90)).sequences
    assert torch.equal(run(transformed(compile="inductor"), prompt(90)).sequences, expected)
