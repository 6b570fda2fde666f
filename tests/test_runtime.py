"""The generation loop against transformers' own, and what it leaves in the cache."""

import gc
import logging
import weakref

import pytest
import torch
from conftest import VOCABULARY, cache_of, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessor,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import ckv_compile
from ckv_compile import runtime
from ckv_compile.runtime import DecodeStep, Sampler, decode_loop

SMALL = {"budget": 40, "interval": 8, "n_sink": 2, "n_recent": 6, "chunk_size": 8}
OPTIONS = {
    "greedy": {"do_sample": False},
    "greedy, repetition penalty": {"do_sample": False, "repetition_penalty": 1.7},
    "sample": {"do_sample": True, "top_k": 0},
    "temperature": {"do_sample": True, "temperature": 0.6},
    "top-k, top-p": {"do_sample": True, "top_k": 20, "top_p": 0.8},
    "min-p": {"do_sample": True, "top_k": 0, "min_p": 0.05},
    "all": {"do_sample": True, "temperature": 1.3, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.2},
}


class Same(LogitsProcessor):
    """Changes nothing, and is not known to our loop."""

    def __call__(self, input_ids, scores):
        return scores


class Collect(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens.append(value.tolist())

    def end(self):
        self.tokens.append("end")


def transformed(**options):
    return ckv_compile.transform(tiny_model(), compile="eager", **(SMALL | options))


def padded_batch(prompt, *lengths):
    """Left-padded rows of these lengths, with their mask."""
    width = max(lengths)
    ids, mask = prompt(width, batch=len(lengths)), torch.ones(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, : width - length], mask[row, : width - length] = 0, 0
    return {"inputs": ids, "attention_mask": mask}


@pytest.fixture
def no_other_loop(monkeypatch):
    """Fail if transformers' own loop is used."""
    monkeypatch.setattr("transformers.GenerationMixin._sample", None)


@pytest.mark.usefixtures("no_other_loop")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_are_those_of_transformers_for_the_same_seed(options, prompt, monkeypatch):
    """Within the budget, on left-padded rows that end at different steps."""
    model, ours = tiny_model(), transformed(budget=200)
    arguments = padded_batch(prompt, 24, 15, 3) | {"max_new_tokens": 40, "pad_token_id": 3} | options
    torch.manual_seed(1)
    tokens = ours.generate(**arguments)
    arguments["eos_token_id"] = [int(tokens[0, 30]), int(tokens[1, 27])]
    torch.manual_seed(1)
    tokens = ours.generate(**arguments)
    monkeypatch.undo()
    torch.manual_seed(1)
    assert torch.equal(tokens, model.generate(**arguments))
    assert (tokens[:, 24:] == 3).any(), "a row ended before the others"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_over_compactions_tokens_are_those_of_transformers_loop_on_our_forward(options, prompt, caplog):
    ours = transformed()
    arguments = {"inputs": prompt(60), "max_new_tokens": 50, **options}
    torch.manual_seed(2)
    tokens = ours.generate(**arguments)
    torch.manual_seed(2)
    with caplog.at_level(logging.INFO, logger="ckv_compile"):
        assert torch.equal(tokens, ours.generate(**arguments, logits_processor=[Same()]))
    assert "generating by transformers' own loop, for Same" in caplog.messages


@pytest.mark.parametrize("lag", [0, 1, 2, 7])
def test_steps_launched_ahead_of_the_end_change_nothing(lag, prompt):
    """The host may run ahead: tokens, stream, columns and the cache are those of a host that looks at once."""
    ours, ids = transformed(), prompt(30, batch=2)
    free = ours.generate(ids, max_new_tokens=30)
    ends = torch.tensor([int(free[0, 41]), int(free[1, 52])])
    results = []
    for each in (0, lag):
        cache, streamer = ours.new_cache(2), Collect()
        logits = ours(ids, past_key_values=cache).logits
        # A padding token outside of the vocabulary, which the steps launched ahead must not look up.
        sampler = Sampler([], [EosTokenCriteria(ends)], False, torch.tensor(-1), ids.device)
        step = DecodeStep(ours.graph, cache.state, sampler, VOCABULARY, False)
        with torch.no_grad():
            tokens = decode_loop(step, cache, ids, logits, sampler, 60, streamer, lag=each)
        results.append((tokens, streamer.tokens, cache.columns, cache.state))
    (tokens, streamed, columns, state), (late_tokens, late_streamed, late_columns, late_state) = results
    assert torch.equal(tokens, late_tokens)
    assert 30 < tokens.shape[1] < 60, "ended by itself"
    assert streamed == late_streamed == tokens[:, 30:].T.tolist()
    assert columns == late_columns == tokens.shape[1] - 1, "the last token is in no cache"
    assert all(torch.equal(one, other) for one, other in zip(state[:4], late_state[:4], strict=True))
    assert torch.equal(state.position, late_state.position)


@pytest.mark.parametrize("name", ["greedy", "greedy, repetition penalty"])
def test_a_row_that_ends_early_is_that_row_alone(name, prompt):
    """Its end enters its cache, but no padding does; the others go on over compactions.

    In float64: one row and two take other paths through BLAS, and rounding may decide which slots are exact.
    """
    ours = ckv_compile.transform(tiny_model().double(), compile="eager", **SMALL)
    arguments = {"max_new_tokens": 60, "pad_token_id": 0, "return_dict_in_generate": True, **OPTIONS[name]}
    shown = torch.ones(2, 50, dtype=torch.int64)  # the prompt holds the padding token too
    free = ours.generate(prompt(50, batch=2), attention_mask=shown, **arguments).sequences
    arguments["eos_token_id"] = int(free[0, 60])
    batch = ours.generate(prompt(50, batch=2), attention_mask=shown, **arguments)
    state = cache_of(batch).state
    lengths = []
    for row in range(2):
        alone = ours.generate(prompt(50, batch=2)[row : row + 1], attention_mask=shown[:1], **arguments)
        own = cache_of(alone).state
        lengths.append(alone.sequences.shape[1])
        assert torch.equal(batch.sequences[row, : lengths[row]], alone.sequences[0])
        assert not batch.sequences[row, lengths[row] :].any()
        assert int(own.position) == lengths[row] - 1
        ended_early = lengths[row] < batch.sequences.shape[1]
        assert int(state.position[row]) == lengths[row] - 1 + ended_early
        if ended_early:
            ours(alone.sequences[:, -1:], past_key_values=cache_of(alone))
        fill = int(own.fill)
        assert int(state.fill[row]) == fill
        assert torch.equal(state.degree[row, :, :, :fill], own.degree[0, :, :, :fill])
        # One row and two go through different matrix products, which round differently.
        torch.testing.assert_close(state.keys[row, :, :, :fill], own.keys[0, :, :, :fill], rtol=1e-4, atol=1e-4)
    assert lengths[0] < lengths[1]


def test_a_conversation_goes_on_after_rows_that_ended_at_different_steps(prompt):
    ours = transformed(budget=400)
    free = ours.generate(prompt(20, batch=2), max_new_tokens=30)
    options = {"pad_token_id": 0, "eos_token_id": int(free[0, 30]), "return_dict_in_generate": True}
    first = ours.generate(prompt(20, batch=2), max_new_tokens=30, **options)
    cache, turn = cache_of(first), prompt(7, batch=2, seed=5)
    ids = torch.cat([first.sequences, turn], dim=1)
    end = int((first.sequences[0] == options["eos_token_id"]).nonzero()[0]) + 1
    mask = torch.ones_like(ids)
    mask[0, end : first.sequences.shape[1]] = 0  # what any chat template would hide: the padding
    assert end < first.sequences.shape[1]
    again = ours.generate(ids, attention_mask=mask, max_new_tokens=5, past_key_values=cache)
    for row, tokens in enumerate((torch.cat([ids[0, :end], turn[0]]), ids[1])):
        expected = tiny_model().generate(tokens[None], max_new_tokens=5, attention_mask=torch.ones_like(tokens[None]))
        assert torch.equal(again[row, -5:], expected[0, -5:])


def test_a_step_reads_nothing_back_from_the_device(prompt):
    """No operator of a step, of any kind of sampling, brings a number to the host."""
    processors = [
        RepetitionPenaltyLogitsProcessor(1.3),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.01),
    ]
    ours = transformed()
    cache = ours.new_cache(2)
    logits = ours(prompt(30, batch=2), past_key_values=cache).logits
    criteria = [EosTokenCriteria([5, 6])]
    assert Sampler.obstacle(processors, criteria) is None
    sampler = Sampler(processors, criteria, True, torch.tensor(0), logits.device)
    step = DecodeStep(ours.graph, cache.state, sampler, VOCABULARY, False)
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        step.start(prompt(30, batch=2), logits)
        with Watch():
            step.run()
    aten = torch.ops.aten
    assert aten.exponential_ in seen
    assert torch.ops.ckv.compact_ in seen
    # isin sorts and counts when there are many ends, which waits too.
    assert not {aten._local_scalar_dense, aten.item, aten.nonzero, aten.is_nonzero, aten.equal, aten.isin} & set(seen)


def test_options_that_need_transformers_loop_are_named():
    assert Sampler.obstacle([Same()], []) == "Same"
    penalty = RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=300)  # may be longer than the prompt
    assert Sampler.obstacle([penalty], []) == "RepetitionPenaltyLogitsProcessor"
    assert Sampler.obstacle([], [lambda ids, scores: False]) == "function"


def test_samplers_share_a_step_only_if_they_are_alike():
    def key(*processors, sample=True, ends=(1,), pad=0):
        return Sampler(processors, [EosTokenCriteria(list(ends))], sample, torch.tensor(pad), torch.device("cpu")).key

    base = key(TopKLogitsWarper(5))
    assert base == key(TopKLogitsWarper(5))
    others = [key(TopKLogitsWarper(6)), key(), key(TopKLogitsWarper(5), sample=False), key(TopKLogitsWarper(5), pad=1)]
    assert base not in [*others, key(TopKLogitsWarper(5), ends=(2,)), key(TopPLogitsWarper(0.5))]


def test_scores_that_were_asked_for_are_returned(prompt):
    out = transformed().generate(prompt(9), max_new_tokens=4, return_dict_in_generate=True, output_scores=True)
    assert len(out.scores) == 4


# ---------------------------------------------------------------------- caches kept for recorded steps, as on CUDA


@pytest.fixture
def keeping(monkeypatch):
    """A model that keeps its caches as it does on CUDA; its steps are run instead of recorded."""

    def record(step):
        run = weakref.WeakMethod(step._run)  # as a recording, it does not hold the step
        return lambda: run()()

    ours = transformed()
    monkeypatch.setattr(runtime.DecodeStep, "_record", record)
    ours._records = True
    return ours


def test_a_kept_cache_and_its_step_serve_the_next_call(keeping, prompt):
    expected = transformed()
    for length, options in ((60, {}), (9, {}), (60, {"do_sample": True}), (100, {})):
        for each in (torch.manual_seed(3), keeping), (torch.manual_seed(3), expected):
            torch.manual_seed(3)
            tokens = each[1].generate(prompt(length), max_new_tokens=30, **options)
            if each[1] is keeping:
                kept = tokens
        assert torch.equal(kept, tokens)
    assert len(keeping._steps) == 1
    assert len(keeping._steps[keeping._idle]) == 2, "a step for each kind of sampling"


def test_a_cache_that_the_caller_has_is_not_used_again(keeping, prompt):
    first = cache_of(keeping.generate(prompt(60), max_new_tokens=5, return_dict_in_generate=True))
    before = [tensor.clone() for tensor in first.state]
    keeping.generate(prompt(9), max_new_tokens=5)
    assert all(torch.equal(old, new) for old, new in zip(before, first.state, strict=True))
    assert first is not keeping._idle


def test_release_frees_what_is_kept(keeping, prompt):
    keeping.generate(prompt(9, batch=2), max_new_tokens=5)
    kept = weakref.ref(keeping._idle.state.keys)
    keeping.release()
    assert kept() is None, "without the garbage collector"


def test_a_call_of_another_batch_size_replaces_the_kept_cache(keeping, prompt):
    keeping.generate(prompt(9, batch=2), max_new_tokens=5)
    kept = weakref.ref(keeping._idle.state.keys)
    keeping.generate(prompt(9, batch=3), max_new_tokens=5)
    assert keeping._idle.batch_size == 3
    assert kept() is None


def test_what_a_recorded_step_reads_lives_as_long_as_the_step(keeping, prompt):
    """A recording holds addresses, and a later call with the same options brings tensors of its own."""
    options = {"max_new_tokens": 5, "eos_token_id": [3, 4], "pad_token_id": 0, "repetition_penalty": 1.2}
    for _ in range(2):
        keeping.generate(prompt(9), **options)
    (step,) = keeping._steps[keeping._idle]
    read = [step.sampler.ends, step.sampler.pad, step.seen, step.ids, step.tokens, step.ended, *step.state]
    keeping.generate(prompt(9), **options)
    gc.collect()
    now = [step.sampler.ends, step.sampler.pad, step.seen, step.ids, step.tokens, step.ended, *step.state]
    assert all(one is other for one, other in zip(read, now, strict=True))
    assert keeping._steps[keeping._idle] == [step]


def test_a_failed_call_keeps_no_cache(keeping, prompt):
    class Break(BaseStreamer):
        def put(self, value):
            if value.numel() == 1:
                raise OSError("closed")

        def end(self):
            raise AssertionError

    with pytest.raises(OSError, match="closed"):
        keeping.generate(prompt(9), max_new_tokens=5, streamer=Break())
    assert keeping._idle is None
    assert keeping._lent is None


# ------------------------------------------------------------------------------------------------- edges of generate()


def test_a_call_leaves_no_cache_behind_for_the_garbage_collector(prompt, monkeypatch):
    ours, caches = transformed(), []
    new_cache = ours.new_cache
    monkeypatch.setattr(ours, "new_cache", lambda rows: caches.append(new_cache(rows)) or caches[-1])
    gc.disable()
    try:
        ours.generate(prompt(9), max_new_tokens=3)
        keys = weakref.ref(caches.pop().state.keys)
        assert keys() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("no_other_loop")
def test_many_end_tokens(prompt, monkeypatch):
    model, ours = tiny_model(), transformed(budget=200)
    arguments = {"max_new_tokens": 40, "eos_token_id": list(range(60, 75)), "pad_token_id": 1}
    tokens = ours.generate(prompt(9), **arguments)
    monkeypatch.undo()
    assert torch.equal(tokens, model.generate(prompt(9), **arguments))
    assert tokens.shape[1] < 49


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": int(1e30), "eos_token_id": list(range(40, 128)), "pad_token_id": 1},
        {"stopping_criteria": [MaxLengthCriteria(9)], "max_new_tokens": 5},
        {"stopping_criteria": [MaxLengthCriteria(4)], "max_new_tokens": 5},
        {"stopping_criteria": [EosTokenCriteria(list(range(40, 128)))], "max_new_tokens": 50, "pad_token_id": 1},
    ],
    ids=["endless", "as long as the prompt", "shorter than the prompt", "a criterion of the caller's own"],
)
def test_lengths_and_criteria_are_those_of_transformers(options, prompt):
    ids = prompt(9).to(torch.int32)
    tokens = transformed(budget=200).generate(ids, **options)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, tiny_model().generate(ids.long(), **options))


def test_rows_that_ended_at_different_steps_need_a_mask_to_go_on(prompt):
    ours = transformed(budget=400)
    free = ours.generate(prompt(20, batch=2), max_new_tokens=30)
    out = ours.generate(
        prompt(20, batch=2),
        attention_mask=torch.ones(2, 20, dtype=torch.int64),
        max_new_tokens=30,
        pad_token_id=0,
        eos_token_id=int(free[0, 30]),
        return_dict_in_generate=True,
    )
    turn = torch.cat([out.sequences[:, -1:], prompt(5, batch=2)], dim=1)
    with pytest.raises(ckv_compile.InputError, match="the padding behind a row that ended before the others"):
        ours(turn, past_key_values=cache_of(out))
