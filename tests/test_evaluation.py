"""The evaluation: prompts of exact lengths, what methods keep, and what a run of all of it says."""

import dataclasses
import json
import string

import pytest
import torch
from conftest import tiny_model
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from ckv_compile import cli, render
from ckv_compile.config import layer_numbers
from ckv_compile.errors import ConfigError, InputError, UnsupportedModelError
from ckv_compile.evaluation import evaluate, files, harness, methods, tasks, texts
from ckv_compile.evaluation.ablations import ABLATIONS, VARIANTS, csm, most_slots
from ckv_compile.evaluation.calibration import lightest, losses, ranges
from ckv_compile.evaluation.candidates import KNOWN, candidate, compression
from ckv_compile.evaluation.harness import Chosen, Reader, choose, predict, run
from ckv_compile.evaluation.language import divergences
from ckv_compile.evaluation.methods import FULL, METHODS, OURS, Layer
from ckv_compile.evaluation.outcomes import (
    MEAN,
    Log,
    Outcome,
    TextOutcome,
    difference,
    student,
    summarise,
    summarise_texts,
    wilson,
)
from ckv_compile.model import transform
from ckv_compile.schedule import Schedule

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SINK, RECENT = 2, 6
PROTECTED = {"n_sink": SINK, "n_recent": RECENT}
EVICTING = [name for name in METHODS if name not in (FULL, OURS, "kmeans", "d2o")]
BEFORE_ROPE = ("csm-before-rope", "ours-before-rope")
KEEPS_ALL_DEGREES = (FULL, "kmeans", *(name for name in (OURS, *VARIANTS) if name != "csm-no-degree"))


def tokenizer(template=TEMPLATE):
    """A token a character, so that a prompt can be read and its length counted."""
    characters = {character: i for i, character in enumerate(string.printable)}
    tokenizer = Tokenizer(models.BPE(characters, [], unk_token="\x0c"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="\x0c", chat_template=template)


def plan(budget):
    return Schedule(budget, SINK, RECENT, chunk_size=16, r_init=0.25, r_decay=0.01, r_min=0.05)


def kept(name, given, budget):
    (slots,) = KNOWN[name](given, [plan(budget)])
    return slots


def layer(tokens=40, heads=4, kv_heads=2, dim=8, softcap=0.0, sinks=None):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, tokens, dim, generator=generator) for n in (heads, kv_heads, kv_heads))
    angles = torch.arange(tokens)[:, None] * torch.tensor([1.0, 0.1]).repeat(2)
    return Layer(q, k, v, dim**-0.5, softcap, sinks, (angles.cos(), angles.sin()))


@pytest.mark.parametrize("kind", tasks.KINDS)
def test_a_prompt_has_its_length_and_its_answers(kind):
    characters = tokenizer()
    for length, depth, seed in [(800, 0.0, 0), (801, 0.5, 1), (1100, 1.0, 2)]:
        sample = tasks.make(kind, characters, length, depth, seed)
        assert len(sample.context) + len(sample.question) == length
        context, question = characters.decode(sample.context), characters.decode(sample.question)
        assert context.startswith("<user>")
        assert "\n<assistant>" in question
        assert all(answer in context and answer not in question for answer in sample.answers)
        assert sample.reply > sum(map(len, sample.answers))
        assert sample == tasks.make(kind, characters, length, depth, seed)
        assert sample.context != tasks.make(kind, characters, length, depth, seed + 1).context


@pytest.mark.parametrize("kind", ["needle", "needle-essay", "multi-key", "multi-value", "uuid", "recall", "documents"])
def test_the_needle_stands_at_its_depth(kind):
    characters = tokenizer()
    found = []
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        sample = tasks.make(kind, characters, 3000, depth, seed=3)
        found.append(characters.decode(sample.context).index(sample.answers[0]) / len(sample.context))
    assert found == pytest.approx([0.04, 0.26, 0.5, 0.74, 0.95], abs=0.08)


def test_a_chain_of_variables_stands_in_order():
    for depth in (0.0, 0.4, 1.0):
        sample = tasks.make("variables", tokenizer(), 900, depth, seed=0)
        context = tokenizer().decode(sample.context)
        places = [context.index(f"goes to {name}.") for name in sample.answers]
        assert places == sorted(places)
        assert len(places) == 3


def test_counted_words_are_the_most_frequent():
    for kind in ("common-words", "frequent-words"):
        sample = tasks.make(kind, tokenizer(), 4000, 0.0, seed=0)
        words = tokenizer().decode(sample.context).split("\n")[1].split(" I saw the ")[1:-1]
        assert sample.answers == (max({*words}, key=words.count).removesuffix("."),)


def test_without_a_chat_template_the_text_stands_alone():
    sample = tasks.make("needle", tokenizer(None), 500, 0.5, 0)
    assert tokenizer().decode(sample.context).startswith("Some secret numbers")
    assert len(sample.context) + len(sample.question) == 500


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("haystack", 500, 0.5), "task 'haystack': choose one of needle, needle-essay"),
        (("needle", 500, 1.5), "depth=1.5"),
        (("needle", 50, 0.5), "length=50: a prompt of the task 'needle' has at least"),
    ],
    ids=["kind", "depth", "length"],
)
def test_a_prompt_that_cannot_be_made_is_refused(arguments, message):
    kind, length, depth = arguments
    with pytest.raises(InputError, match=message):
        tasks.make(kind, tokenizer(), length, depth, 0)


def test_scores_are_shares_of_the_answers():
    assert tasks.score(("12", "abc"), "It is ABC and 13") == 0.5
    assert tasks.score(("12",), "12.") == 1.0
    assert tasks.score(("12",), "") == 0.0


@pytest.mark.parametrize("name", KNOWN)
def test_a_method_keeps_its_budget_and_what_is_protected(name):
    given = layer()
    for budget, slots in zip((20, 30), KNOWN[name](given, [plan(20), plan(30)]), strict=True):
        count = 40 if name == FULL else budget
        assert slots.keys.shape == slots.values.shape == (2, count, 8)
        assert slots.degree.sum(dim=1).tolist() == [40.0 if name in KEEPS_ALL_DEGREES else count] * 2
        for found, exact in ((slots.keys, given.k), (slots.values, given.v)):
            if name not in ("d2o", "ours-int8"):  # which merges into protected tokens too, and rounds them
                assert torch.equal(found[:, :SINK], exact[:, :SINK])
                assert torch.equal(found[:, -RECENT:], exact[:, -RECENT:])


@pytest.mark.parametrize("name", EVICTING)
def test_evicting_methods_keep_tokens_in_order_with_their_values(name):
    given = layer()
    slots = kept(name, given, 20)
    for head in range(2):
        where = [next(i for i in range(40) if torch.equal(given.k[head, i], key)) for key in slots.keys[head]]
        assert where == sorted({*where})
        assert torch.equal(slots.values[head], given.v[head, where])


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "ours-int8"])
@pytest.mark.parametrize("budget", [40, 50])
def test_a_budget_of_all_tokens_keeps_them(name, budget):
    given = layer()
    slots = kept(name, given, budget)
    assert torch.equal(slots.keys, given.k)
    assert torch.equal(slots.values, given.v)
    assert bool((slots.degree == 1).all())


def special(name, given):
    """Make token 10 the one that a method must keep, and the others alike."""
    q, k, v = (torch.randn_like(tensor) * 0.01 for tensor in given[:3])
    k[..., 0] += 1.0
    towards = torch.zeros(8)
    towards[1] = 5.0
    if name == "key-norm":
        k[:, 10] *= 0.1
        return given._replace(q=q, k=k, v=v)
    k[:, 10] = towards
    who = {"tova": slice(39, 40), "snapkv": slice(35, 38), "h2o": slice(15, 30), "expected-attention": slice(3, 40)}
    q[:, who.get(name, slice(0, 0))] = 5 * towards
    return given._replace(q=q, k=k, v=v + 1.0)


@pytest.mark.parametrize("name", [name for name in EVICTING if name != "streaming"])
def test_a_method_keeps_what_it_is_made_to_keep(name):
    given = special(name, layer())
    found = kept(name, given, SINK + RECENT + 1).keys[:, SINK]
    if name == "snapkv":  # whose neighbours share its score, the first of them first
        torch.testing.assert_close(found, given.k[:, 7])
    else:
        torch.testing.assert_close(found, given.k[:, 10])


def test_streaming_keeps_the_latest():
    given = layer()
    assert torch.equal(kept("streaming", given, 20).keys[:, SINK:], given.k[:, -20 + SINK :])


def test_kmeans_finds_clusters_of_equal_keys():
    given = layer()
    kinds = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)) * 10
    members = torch.arange(SINK, 40 - RECENT) % 32 // 8  # 8 of each kind
    given.k[:, SINK:-RECENT] = kinds[:, members]
    slots = kept("kmeans", given, SINK + 4 + RECENT)
    counts = members.bincount()
    for head in range(2):
        for i in range(4):
            found = (slots.keys[head] - kinds[head, i]).norm(dim=-1).argmin()
            torch.testing.assert_close(slots.keys[head, found], kinds[head, i])
            assert slots.degree[head, found] == counts[i]
            mean = given.v[head, SINK:-RECENT][members == i].mean(dim=0)
            torch.testing.assert_close(slots.values[head, found], mean)


def test_kmeans_leaves_a_cluster_without_tokens_empty():
    given = layer()
    given.k[:, SINK:-RECENT] = given.k[:, SINK : SINK + 1]
    slots = kept("kmeans", given, 20)
    assert slots.degree.sum(dim=1).tolist() == [40.0, 40.0]
    assert bool((slots.degree == 0).any() & slots.keys.isfinite().all() & slots.values.isfinite().all())


def test_d2o_merges_the_similar_part_of_what_it_evicts():
    given = special("h2o", layer())  # which keeps token 10, and of the others the sinks and the recents
    slots = kept("d2o", given, SINK + RECENT + 1)
    stays = [*range(SINK), 10, *range(40 - RECENT, 40)]
    gone = [token for token in range(40) if token not in stays]
    for head in range(2):
        unit = torch.nn.functional.normalize(given.k[head], dim=-1)
        cosine, joined = (unit[gone] @ unit[stays].T).max(dim=1)
        for slot, token in enumerate(stays):
            members = [i for i in range(len(gone)) if joined[i] == slot and cosine[i] >= cosine.mean()]
            weights = torch.cat([torch.ones(1), cosine[members]]).exp()
            tokens = [token, *(gone[i] for i in members)]
            expected = (weights[:, None] * given.v[head, tokens]).sum(dim=0) / weights.sum()
            torch.testing.assert_close(slots.values[head, slot], expected)


def test_variants_begin_with_the_method_of_the_product():
    given = layer(tokens=90)
    for mine, product in zip(csm(given, [plan(30), plan(60)]), kept_by_ours(given, 30, 60), strict=True):
        for found, expected in zip(mine, product, strict=True):
            torch.testing.assert_close(found, expected)
    for name in VARIANTS.keys() - {"ours-by-heads"}:
        slots, same = kept(name, given, 30), kept("csm", given, 30)
        assert torch.equal(slots.keys, same.keys) == (name in ("csm", "csm-no-degree"))


def kept_by_ours(given, *budgets):
    return KNOWN[OURS](given, [plan(budget) for budget in budgets])


def test_a_partition_decides_who_can_merge():
    given = layer()
    middle = slice(SINK, SINK + 32)
    for partition, twins in (("csm", (0, 1)), ("csm-contiguous", (0, 16))):
        given.k[:, middle] = torch.eye(32, 8) + torch.arange(32)[:, None] * torch.tensor([0.0] * 7 + [0.1])
        given.k[:, SINK + twins[1]] = given.k[:, SINK + twins[0]]
        (slots,) = KNOWN[partition](given, [wide(39)])
        assert (slots.degree == 2).nonzero().tolist() == [[head, SINK + max(twins) - 1] for head in range(2)]


def test_centroids_may_keep_their_length_have_a_limit_and_mind_values():
    given = layer(tokens=90)
    longest, limited = kept("csm", given, 20), kept("csm-degree-8", given, 20)
    assert longest.degree.max() > 8
    assert limited.degree.max() <= 8
    given.k[:] = torch.nn.functional.normalize(given.k, dim=-1) * 3
    assert kept("csm", given, 20).keys.norm(dim=-1).min() < 2.9
    torch.testing.assert_close(kept("csm-keep-norm", given, 20).keys.norm(dim=-1), torch.full((2, 20), 3.0))
    given.k[:, SINK : SINK + 3] = given.k[:, SINK : SINK + 1]  # three alike, of which two have the same value
    given.v[:, SINK + 1] = given.v[:, SINK + 2]
    given.v[:, SINK] = -given.v[:, SINK + 2]
    assert kept("csm", given, 89).degree[0, SINK] == 2  # the first match of two that are equally good
    assert kept("csm-with-values", given, 89).degree[0, SINK : SINK + 2].tolist() == [1, 2]


def test_the_slots_most_like_the_others_go_where_likeness_decides():
    given = layer()
    given.k[:, SINK:-RECENT] = torch.eye(8)[0] + 0.1 * torch.randn(2, 40 - SINK - RECENT, 8)
    given.k[:, SINK + 5] = -torch.eye(8)[0]
    (slots,) = KNOWN["csm-distinct"](given, [wide(SINK + RECENT + (41 - SINK - RECENT) // 2)])
    assert any(torch.equal(key, given.k[0, SINK + 5]) for key in slots.keys[0])


def test_eight_bits_are_a_step_of_the_largest_number():
    given = layer()
    exact, rounded = kept(OURS, given, 30), kept("ours-int8", given, 30)
    for found, expected in ((rounded.keys, exact.keys), (rounded.values, exact.values)):
        step = expected.abs().amax(dim=-1, keepdim=True) / 127
        assert bool(((found - expected).abs() <= step / 2 * 1.001).all())
        assert not torch.equal(found, expected)


def test_variants_with_exact_slots_begin_with_ours():
    given, half = layer(tokens=90), dataclasses.replace(plan(60), n_exact=24)
    for mine, product in zip(csm(given, [half], exact=True), KNOWN[OURS](given, [half]), strict=True):
        for found, expected in zip(mine, product, strict=True):
            torch.testing.assert_close(found, expected)
    front = SINK + 24
    for name in ("ours-contiguous", "ours-before-rope"):
        (slots,), (same,) = KNOWN[name](given, [half]), KNOWN[OURS](given, [half])
        assert torch.equal(slots.keys[:, :front], same.keys[:, :front])
        assert not torch.equal(slots.keys[:, front:], same.keys[:, front:])


def test_an_adaptive_round_merges_what_is_alike_enough():
    given = layer(tokens=SINK + 32 + RECENT)
    given.k[:, SINK : SINK + 32] = (
        torch.eye(16).repeat_interleave(2, dim=0)[:, :8] + 0.01 * given.k[:, SINK : SINK + 32]
    )
    given.k[:, SINK : SINK + 8] = given.k[:, SINK : SINK + 1]  # alike: one round merges the four of A, if it may
    few = dataclasses.replace(wide(SINK + 32 + RECENT - 4), r_init=0.1)
    assert len(few.rounds(SINK + 32 + RECENT)) > 1
    (slots,) = KNOWN["csm-adaptive"](given, [few])
    assert slots.degree.sum(dim=1).tolist() == [SINK + 32 + RECENT] * 2
    assert slots.degree[:, SINK].tolist() == [5.0] * 2


def test_heads_that_are_attended_to_have_more_exact_slots():
    given, half = layer(tokens=90), dataclasses.replace(plan(60), n_exact=24)
    given.q[:, -8:] = given.q[0, -1]
    given.k[0, 0] = 5.0 * given.q[0, -1]  # the sink, which is attended to in place of all others
    given.k[1, SINK:-RECENT] = 3.0 * given.q[0, -1]
    (slots,) = KNOWN["ours-by-heads"](given, [half])
    assert slots.keys.shape[1] == most_slots("ours-by-heads", half) == 72
    assert (slots.degree > 0).sum(dim=1).tolist() == [48, 72]
    assert slots.degree.sum(dim=1).tolist() == [90, 90]
    assert most_slots(OURS, half) == 60


def wide(budget):
    return Schedule(budget, SINK, RECENT, chunk_size=32, r_init=0.25, r_decay=0.01, r_min=0.05)


def test_chunks_merge_alike_if_they_choose_apart():
    given = layer(tokens=SINK + 4 * 16 + RECENT)
    given.k[:, SINK : SINK + 16] = given.k[:, SINK : SINK + 1]  # whose matches are the best of the row
    one = Schedule(SINK + 4 * 16 + RECENT - 16, SINK, RECENT, chunk_size=16, r_init=0.5, r_decay=0.01, r_min=0.05)
    for name, merged in (("csm", 8), ("csm-per-chunk", 4)):
        (slots,) = KNOWN[name](given, [one])
        assert slots.degree[0, SINK : SINK + 16 - merged].sum() == 16


def test_keys_before_rope_are_those_that_were_rotated():
    given = layer()
    cos, sin = given.rope
    half = torch.cat([-given.k[..., 2:4], given.k[..., 0:2]], dim=-1)
    rotated = torch.cat([given.k[..., :4] * cos + half * sin, given.k[..., 4:]], dim=-1)
    torch.testing.assert_close(given._replace(k=rotated).unrotated(), given.k)
    with pytest.raises(UnsupportedModelError, match="rotary_emb"):
        given._replace(rope=None).unrotated()


def test_attention_is_that_of_the_model_by_blocks():
    given = layer(tokens=7, softcap=2.0, sinks=torch.tensor([0.5, -1.0, 0.0, 2.0]))
    whole = methods._attention(given, 0, 7)
    parts = [methods._attention(given, start, start + 3) for start in (0, 3, 6)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    scores = 2.0 * torch.tanh(given.q @ given.k.repeat_interleave(2, dim=0).mT * given.scale / 2.0)
    weights = scores.exp().tril()
    weights = weights / (weights.sum(dim=-1, keepdim=True) + given.sinks.exp()[:, None, None])
    torch.testing.assert_close(whole, weights.view(2, 2, 7, 7).mean(dim=1))


@pytest.fixture(scope="module")
def reader():
    """Reads a model with sliding windows, whose scores are capped."""
    return Reader(tiny_model("gemma2", max_position_embeddings=1024), **PROTECTED)


def chosen(*labels, budgets=(50,)):
    return choose([candidate(label) for label in labels], budgets)


@torch.no_grad()
def test_a_budget_of_the_whole_prompt_is_the_model_itself(prompt):
    model, text = tiny_model("gpt-oss"), prompt(90)
    known = [name for name in KNOWN if name not in (*BEFORE_ROPE, "ours-int8")]
    expected = torch.nn.functional.cross_entropy(model(text).logits[0, -11:-1], text[0, -10:])
    found = predict(Reader(model, **PROTECTED), "text", 3, text, 10, chosen(*known, budgets=(80,)))
    assert [each.method for each in found] == known
    for each in found:
        assert (each.text, each.window, len(each.kl_parts)) == ("text", 3, 8)
        assert abs(each.kl) < 1e-5
        assert each.agreement == 1.0
        assert each.nll == pytest.approx(float(expected), rel=1e-3)


def test_ours_with_an_interval_is_the_product(reader, prompt):
    model, text = reader.original, prompt(150)
    full, found = predict(reader, "", 0, text, 10, chosen("ours:interval=4"))
    (expected,) = evaluate(model, text, [50], 10, interval=4, **PROTECTED)
    assert (found.kl, found.agreement) == pytest.approx((expected.kl, expected.agreement), rel=1e-4, abs=1e-6)
    assert sum(found.kl_parts[:2]) * 2 + sum(found.kl_parts[2:]) == pytest.approx(10 * found.kl, rel=1e-4)
    assert found.kl > 1e-3
    assert full.kl == 0.0


@pytest.mark.parametrize(
    ("family", "slots", "options"),
    [("llama", 30, {"r_init": 1.0, "chunk_size": 16}), ("gemma2", 70, {})],
    ids=["llama", "gemma2"],
)
def test_slots_of_ours_are_those_of_the_product_bit_for_bit(family, slots, options, prompt):
    model, ids = tiny_model(family, num_hidden_layers=2), prompt(150)
    label = "ours:" + ",".join(f"{name}={value}" for name, value in options.items())
    wanted = [(150, compression(candidate(label), budget, PROTECTED)) for budget in (slots, 100)]
    logits, (state,) = Reader(model, **PROTECTED).prefill(ids, wanted, room=5)
    product = transform(model, budget=slots, interval=1, compile="eager", **PROTECTED, **options)
    cache = product.new_cache()
    assert torch.equal(product(ids, cache=cache).logits, logits)
    mine = state.row(0)
    for found, expected in zip(mine[:3], cache.state[:3], strict=True):
        assert torch.equal(found[:, :, :, :slots], expected[:, :, :, :slots])
        assert not found[:, :, :, slots:].any()
    for found, expected in zip(mine[3:], cache.state[3:], strict=True):
        assert torch.equal(found, expected)


def test_rows_of_a_reader_hold_what_their_methods_kept(reader, prompt, monkeypatch):
    monkeypatch.setattr(harness, "_ROWS", 9)
    text = prompt(80)
    names = [name for name in KNOWN if name not in BEFORE_ROPE]
    wanted = [
        (length, compression(candidate(name), slots, PROTECTED))
        for length in (60, 80)
        for name in names
        for slots in (30, 50)
    ]
    logits, batches = reader.prefill(text, wanted, room=11)
    whole, rest = divmod(len(wanted), 9)
    assert [len(state.fill) for state in batches] == [9] * whole + [rest]
    rows = [state.row(b) for state in batches for b in range(len(state.fill))]
    for (length, how), row in zip(wanted, rows, strict=True):
        name, slots = how.candidate.method, length if how.candidate.method == FULL else how.config.budget
        plans = how.plans(length, reader.shape.layers)
        assert int(row.position) == length
        assert int(row.fill) == max(most_slots(name, each) for each in plans)
        assert int(row.fill) == slots or name == "ours-by-heads"
        expected = length if name in KEEPS_ALL_DEGREES else slots
        assert row.degree.sum(dim=-1).flatten().tolist() == pytest.approx([expected] * 3)
    # A row reads the turn and generates as it does alone, whatever the others of its batch read.
    turn = prompt(5, seed=1)
    turns = [turn if length == 60 else None for length, _ in wanted]
    replies = reader.reply(batches, turns, logits, 6, lambda tokens: False)
    assert [len(reply) for reply in replies] == [6] * len(wanted)
    for i in (0, 7, 31, 63):
        logits, alone = reader.prefill(text, wanted[i : i + 1], room=11)
        assert reader.reply(alone, turns[i : i + 1], logits, 6, lambda tokens: False) == replies[i : i + 1]


def test_replies_end_when_all_of_a_batch_have(reader, prompt):
    wanted = [(60, compression(candidate(name), 40, PROTECTED)) for name in (FULL, "tova")]
    logits, batches = reader.prefill(prompt(60), wanted, room=20)
    seen = []

    def ends(tokens):
        seen.append(len(tokens))
        return len(tokens) >= 3

    assert [len(reply) for reply in reader.reply(batches, [None, None], logits, 20, ends)] == [3, 3]
    assert max(seen) == 3


SCRIPT = {  # what each method replies to the first prompt and to the second
    (FULL, None): ("right", "right"),
    (OURS, 0.5): ("right", "wrong"),
    ("tova", 0.5): ("wrong", "wrong"),
}


def test_a_run_scores_what_is_replied(reader, monkeypatch):
    characters = tokenizer()
    prompts = tasks.prompts(["needle"], characters, lengths=[400], depths=[0.2, 0.9], samples=2, seed=7)
    assert [(each.seed, each.depth) for each in prompts] == [(7, 0.2), (8, 0.9)]
    outcomes = []
    for turn, prompt in enumerate(prompts):

        def replies(batches, turns, logits, tokens, ends, turn=turn, sample=prompt.sample):
            assert tokens == sample.reply
            assert [each.fill.tolist() for each in batches] == [[len(sample.context), 200, 200]]
            said = {"right": f"It is {sample.answers[0]}.", "wrong": "It is 12."}
            found = [characters(said[each[turn]]).input_ids for each in SCRIPT.values()]
            assert list(map(ends, found)) == [each[turn] == "right" for each in SCRIPT.values()]
            return found

        monkeypatch.setattr(reader, "reply", replies)
        outcomes += run(reader, characters, prompt, chosen(OURS, "tova", FULL, OURS, budgets=[0.5]), ["after"])
    assert [(each.method, each.budget, each.seed, each.score) for each in outcomes] == [
        (FULL, None, 7, 1.0),
        (OURS, 0.5, 7, 1.0),
        ("tova", 0.5, 7, 0.0),
        (FULL, None, 8, 1.0),
        (OURS, 0.5, 8, 0.0),
        ("tova", 0.5, 8, 0.0),
    ]
    rows = [row for row in summarise(outcomes) if row.task != MEAN]
    assert [(row.method, row.budget, row.samples, row.score) for row in rows] == [
        (FULL, None, 2, 1.0),
        (OURS, 0.5, 2, 0.5),
        ("tova", 0.5, 2, 0.0),
    ]
    assert all(row.low <= row.score <= row.high and row.says_something for row in rows)


def test_a_task_that_the_full_cache_cannot_do_says_nothing():
    def outcomes(task, scores):
        return [
            Outcome(task, 400, 0.5, seed, "inside", method, budget, score, "")
            for method, budget in ((FULL, None), (OURS, 0.5))
            for seed, score in enumerate(scores)
        ]

    rows = summarise(
        outcomes("uuid", [1.0, 1.0, 0.0]) + outcomes("recall", [1.0, 0.5, 1.0]) + outcomes("needle", [1.0, 1.0, 1.0])
    )
    assert [(row.task, row.says_something) for row in rows] == [
        *[(MEAN, True)] * 2,
        *[("uuid", False)] * 2,
        *[("recall", True)] * 2,
        *[("needle", True)] * 2,
    ]
    mean, recall, needle = rows[0], rows[4], rows[6]
    assert (mean.samples, mean.score) == (6, pytest.approx((5 / 6 + 1) / 2))
    assert mean.score - mean.low == pytest.approx(
        ((recall.score - recall.low) ** 2 + (needle.score - needle.low) ** 2) ** 0.5 / 2
    )


def test_texts_have_intervals_over_their_windows():
    def outcomes(text, kls):
        return [TextOutcome(text, i, OURS, 0.5, nll=1.0, kl=kl, agreement=0.5, kl_parts=[kl, 3.0]) for i, kl in kls]

    rows = summarise_texts(outcomes("a", enumerate([1.0, 2.0, 3.0])) + outcomes("b", [(0, 4.0)]))
    assert [(row.text, row.windows, row.kl) for row in rows] == [("a", 3, 2.0), ("b", 1, 4.0), (MEAN, 4, 3.0)]
    assert rows[0].high - rows[0].kl == pytest.approx(4.303 / 3**0.5)
    assert (rows[1].low, rows[1].high, rows[2].low) == (None, None, None)
    assert rows[0].perplexity == pytest.approx(2.71828, abs=1e-5)
    assert rows[0].kl_parts == [2.0, 3.0]


def test_methods_differ_by_their_prompts():
    assert student([1.0] * 50) == (1.0, 0.0)
    mean, half = difference({1: 0.5, 2: 1.0, 3: 0.0}, {1: 0.0, 2: 1.0, 4: 1.0})
    assert (mean, half) == (0.25, pytest.approx(12.706 * 0.25))


@pytest.mark.parametrize(
    ("scores", "interval"),
    [
        ([1.0] * 10, (0.7225, 1.0)),
        ([0.0] * 10, (0.0, 0.2775)),
        ([1.0] * 5 + [0.0] * 5, (0.2366, 0.7634)),
        ([0.5] * 10, (0.2366, 0.7634)),
        ([1.0] * 81 + [0.0] * 182, (0.2553, 0.3662)),
    ],
    ids=["all", "none", "half", "halves", "81 of 263"],
)
def test_the_interval_is_wilsons(scores, interval):
    assert wilson(scores) == pytest.approx(interval, abs=1e-4)


def test_a_candidate_has_options_of_its_own():
    made = compression(candidate("ours:r_init=1,chunk_size=64,interval=8"), 100, {"n_sink": 2, "r_init": 0.5})
    assert (made.config.budget, made.config.r_init, made.config.chunk_size) == (100, 1, 64)
    assert (made.config.n_sink, made.config.interval) == (2, 8)
    assert [made.plans(tokens, 4)[0].budget for tokens in (90, 107, 108)] == [90, 107, 100]
    assert [plan.budget for plan in compression(candidate(FULL), 50, {}).plans(200, 4)] == [200, 200]
    made = compression(candidate("ours:light_layers=0-1+3,light_share=0.4,interval=8"), 100, {"n_recent": 8})
    assert made.config.light_layers == (0, 1, 3)
    assert [plan.budget for plan in made.plans(300, 5)] == [190, 40]


@pytest.mark.parametrize(
    ("label", "slots", "options", "message"),
    [
        ("snap", 50, {}, "method 'snap': choose among full, ours"),
        ("tova", 50, {"interval": 8}, "interval=8"),
        ("tova", 20, {}, "budget=20 slots cannot hold"),
        ("tova", 50, {"n_sinks": 4}, "n_sinks=4"),
        ("tova:r_init=1", 50, {}, "tova has no option 'r_init'; it has n_sink, n_recent"),
        ("ours:budget=9", 50, {}, "ours has no option 'budget'"),
        ("csm:interval=9", 50, {}, "csm has no option 'interval'"),
        ("full:n_sink=1", 50, {}, "full has no option 'n_sink'; it has none"),
        ("ours:r_init=often", 50, {}, "r_init='often' must be a finite number"),
    ],
    ids=["method", "interval", "budget", "option", "own", "own budget", "own interval", "full", "value"],
)
def test_what_cannot_be_compared_is_refused(label, slots, options, message):
    with pytest.raises(ConfigError, match=message):
        compression(candidate(label), slots, options)


def test_an_interval_is_for_texts(prompt):
    (asked,) = tasks.prompts(["needle"], tokenizer(), lengths=[400], depths=[0.5], samples=1)
    with pytest.raises(ConfigError, match="an interval is for texts"):
        run(None, None, asked, [Chosen(candidate("ours:interval=8"), 0.5)])


def test_windows_stand_at_equal_distances():
    characters = tokenizer()
    found = texts.windows(characters, "digits", "0123456789" * 2, 4, 3)
    assert [characters.decode(window[0]) for window in found] == ["0123", "8901", "6789"]
    with pytest.raises(InputError, match="digits: 6 windows of 4 tokens in a text of 20: there is room for 5"):
        texts.windows(characters, "digits", "0123456789" * 2, 4, 6)


def test_texts_for_tuning_and_reporting_are_others():
    found = {name: text() for name, text in texts.TEXTS.items()}
    assert all(len(text) > 150_000 for text in found.values())
    for kind in ("reference", "sources"):
        tuning, reporting = ({*found[f"{kind}-{use}"].splitlines()} for use in ("tuning", "reporting"))
        assert len([line for line in tuning & reporting if len(line.strip()) > 60]) < 0.01 * len(reporting)


def write(path, *records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_files_of_ruler_are_read(tmp_path):
    record = {"index": 0, "input": "Remember.\nThe number is 12.\nWhat is it?", "outputs": ["12", "13"], "length": 40}
    characters = tokenizer()
    niah = write(tmp_path / "niah_single_1" / "validation.jsonl", record, record | {"answer_prefix": " It is"})
    plain, prefixed = files.prompts_of(niah, characters, 5)
    assert [(each.task, each.length, each.seed) for each in (plain, prefixed)] == [
        ("niah_single_1", 0, i) for i in (0, 1)
    ]
    assert characters.decode(plain.sample.context) == "<user>Remember.\nThe number is 12."
    assert characters.decode(plain.sample.question) == "\nWhat is it?\n<assistant>"
    assert characters.decode(prefixed.sample.question).endswith("<assistant> It is")
    assert plain.sample.metric(plain.sample.answers, "12, I think") == 0.5
    (qa,) = files.prompts_of(write(tmp_path / "qa_1.jsonl", record, record), characters, 1)
    assert qa.sample.metric(qa.sample.answers, "12, I think") == 1.0


def test_files_of_longbench_are_read(tmp_path):
    record = {"input": "Who?", "context": "Ada wrote it.", "answers": ["Ada", "Lady Ada"], "length": 3}
    path = write(tmp_path / "all.jsonl", record | {"dataset": "hotpotqa_e"}, record | {"dataset": "gov_report"})
    qa, report = files.prompts_of(path, tokenizer(), 9)
    assert (qa.task, report.task) == ("hotpotqa", "gov_report")
    assert "Question: Who?" in tokenizer().decode(qa.sample.question)
    assert tokenizer().decode(report.sample.context) == "<user>Ada wrote it."
    assert qa.sample.metric(qa.sample.answers, "It was Ada.") == pytest.approx(0.5)
    assert not qa.sample.found("Ada")  # whose F1 what follows may change


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "Who?"}, "line 1 has question: a line of RULER has input, outputs"),
        ({"input": "", "context": "", "answers": [], "dataset": "dureader"}, "dataset 'dureader' has no metric here"),
    ],
    ids=["fields", "dataset"],
)
def test_a_file_of_something_else_is_refused(record, message, tmp_path):
    with pytest.raises(InputError, match=message):
        files.prompts_of(write(tmp_path / "some.jsonl", record), tokenizer(), 1)
    (tmp_path / "some.jsonl").write_text("prose")
    with pytest.raises(InputError, match="line 1: no JSON"):
        files.prompts_of(tmp_path / "some.jsonl", tokenizer(), 1)


@pytest.mark.parametrize(
    ("metric", "reply", "expected"),
    [
        (files.f1, "the Cat sat", 0.8),
        (files.f1, "", 0.0),
        (files.rouge_l, "a cat that sat down", 2 * 2 / (3 + 5)),
        (files.rouge_l, "dogs", 0.0),
        (files.first_class, "A big cat sat\nor not", 1.0),
        (files.first_class, "a dog\nbig cat sat", 0.0),
        (files.code_likeness, "# what?\nbig cat sat\n", 1.0),
        (files.any_of, "Some 12", 1.0),
    ],
    ids=["F1", "F1 of nothing", "ROUGE-L", "ROUGE-L of others", "class", "later class", "code", "any"],
)
def test_metrics_of_files(metric, reply, expected):
    answers = ("12",) if metric is files.any_of else ("big cat sat",)
    assert metric(answers, reply) == pytest.approx(expected)


def test_numbers_in_a_reply_share_the_score():
    assert files.numbers(("Paragraph 3",), "3 or 4") == 0.5
    assert files.numbers(("Paragraph 3",), "none") == 0.0


def test_a_log_goes_on_where_it_ended(tmp_path):
    path, settings = tmp_path / "run.jsonl", {"methods": [("ours", 0.5)], "dtype": "float32"}
    log = Log(path, settings, {"date": "today"})
    log.add(["needle", 1], [{"score": 1.0}])
    with path.open("a") as file:
        file.write('{"prompt": ["nee')  # torn
    again = Log(path, settings, {"date": "tomorrow"})
    assert again.outcomes(["needle", 1]) == [{"score": 1.0}]
    assert again.outcomes(["needle", 2]) is None
    again.add(["needle", 2], [])
    assert [json.loads(line).get("prompt") for line in path.read_text().splitlines()] == [
        None,
        ["needle", 1],
        ["needle", 2],
    ]
    with pytest.raises(InputError, match="with dtype='float32' and not 'bfloat16'"):
        Log(path, settings | {"dtype": "bfloat16"}, {})
    path.write_text("prose\n")
    with pytest.raises(InputError, match="does not begin with the settings"):
        Log(path, settings, {})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a tiny model that reads characters."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model(max_position_embeddings=1024).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def ckv(*arguments):
    return CliRunner().invoke(cli.app, ["eval", *map(str, arguments)])


def test_the_command_line_knows_all_tasks_and_methods():
    assert tuple(tasks.KINDS) == cli.TASKS
    assert tuple(KNOWN) == cli.METHODS
    assert tuple(ABLATIONS) == cli.ABLATIONS
    assert tuple(texts.TEXTS) == cli.TEXTS
    for labels in ABLATIONS.values():
        assert len({(candidate(label).method, compression(candidate(label), 200, {}).config) for label in labels}) > 1


def test_eval_runs_methods_on_tasks_and_goes_on(tiny, tmp_path):
    arguments = [tiny, "--task", "recall", "--method", "kmeans", "--method", "ours:n_recent=8", "--seed", 9]
    arguments += ["--budget", "50%", "--budget", 100, "--length", 500, "--depth", 0.5, "--out", tmp_path / "run.jsonl"]
    result = ckv(*arguments, "--samples", 1, "--json")
    assert result.exit_code == 0, result.stderr
    first = (tmp_path / "run.jsonl").read_text()
    result = ckv(*arguments, "--samples", 2, "--task", "needle", "--json")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "run.jsonl").read_text().startswith(first)
    document = json.loads(result.stdout)
    rows = [row for row in document["rows"] if row["task"] != MEAN]
    keys = [(row["task"], row["protocol"], row["method"], row["budget"], row["samples"]) for row in rows]
    methods_kept = [(FULL, None), *[(name, kept) for name in ("kmeans", "ours:n_recent=8") for kept in (0.5, 100)]]
    assert keys == [
        (task, protocol, *each, 2)
        for task in ("recall", "needle")
        for protocol in ("inside", "after")
        for each in methods_kept
    ]
    assert [(row["depth"], row["seed"]) for row in document["outcomes"]] == [(0.5, 9)] * 10 + [(0.5, 10)] * 10 + [
        (0.5, 9)
    ] * 10 + [(0.5, 10)] * 10
    assert document["settings"]["methods"] == [list(each) for each in methods_kept]


def test_eval_prints_a_table_of_each_task(capsys):
    outcomes = [
        Outcome("uuid", 1024, 0.5, 0, "after", method, budget, score, "")
        for method, budget, score in [(FULL, None, 0.0), (OURS, 0.5, 1.0), (OURS, 100, 0.0), ("tova", 0.5, 0.0)]
    ]
    outcomes.append(outcomes[-1]._replace(budget=100))
    render.scores([row._asdict() for row in summarise(outcomes)])
    title, *table = capsys.readouterr().out.splitlines()
    assert title == (
        "uuid, 1,024 tokens, question after, 1 samples: full cache 0% (0% - 79%), so it says nothing: below 70%"
    )
    assert [" ".join(row.split()) for row in table] == [
        "method 50% 100 slots",
        "ours 100% (21% - 100%) 0% (0% - 79%)",
        "tova 0% (0% - 79%) 0% (0% - 79%)",
    ]


def test_eval_compares_methods_on_texts(tiny, tmp_path):
    (tmp_path / "own.txt").write_text("0123456789" * 100)
    arguments = ["--context", 200, "--tokens", 10, "--windows", 2, "--budget", 60, "--ablation", "degree"]
    result = ckv(
        tiny, *arguments, "--file", tmp_path / "own.txt", "--text", "sources-tuning", "--method", "ours:interval=4"
    )
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [lines[i] for i in (0, 6, 12)] == [
        "sources-tuning, 2 windows",
        f"{tmp_path / 'own.txt'}, 2 windows",
        "all texts, 4 windows",
    ]
    assert [" ".join(line.split()[:3]) for line in lines[1:6]] == [
        "method kept perplexity",
        "full full cache",
        "ours:interval=4 60 slots",
        "csm 60 slots",
        "csm-no-degree 60 slots",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--length", 300], 2, "--length is for tasks: add a --task"),
        (["--task", "needle", "--context", 300], 2, "--context is for texts: leave --task out"),
        (["--task", "haystack"], 2, "haystack"),
        (["--method", "snap:n_sink=1"], 2, "snap"),
        (["--task", "needle", "--length", 300, "--budget", 20], 1, "budget=20 slots cannot hold"),
        (["--method", "tova:interval=8"], 1, "tova has no option 'interval'"),
    ],
    ids=["length", "context", "task", "method", "budget", "interval"],
)
def test_eval_names_what_is_wrong(arguments, code, message, tiny):
    result = ckv(tiny, *arguments)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.replace("│", " ").split())


# ------------------------------------------------------------------------------------------------------- calibration


def test_a_layer_that_nothing_reads_is_the_lightest(prompt):
    model = tiny_model(num_hidden_layers=4)
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight.zero_()
    windows = {"a": [prompt(90, seed=1)], "b": [prompt(90, seed=2)]}
    shown: list[tuple[int, int]] = []
    found = losses(Reader(model, **PROTECTED), windows, 20, 0.3, lambda *each: shown.append(each))
    assert [loss.layer for loss in found] == [0, 1, 2, 3]
    assert found[2].kl < 1e-9 < min(loss.kl for loss in found if loss.layer != 2)
    light = lightest(found)
    assert len(light) == 2
    assert 2 in light
    assert max(found[layer].kl for layer in light) <= min(loss.kl for loss in found if loss.layer not in light)
    assert shown[-1] == (8, 8)


def test_what_a_layer_loses_alone_is_that_of_the_product(prompt):
    """The same by `transform`: a budget of all tokens for all layers but one."""
    model, text, predicted = tiny_model().double(), prompt(120), 10
    options = PROTECTED | {"exact": 0.2}  # few enough to leave an interval its slots
    (loss, *_) = losses(Reader(model, **options), {"a": [text]}, predicted, 0.3, lambda *_: None)
    options |= {"budget": 120, "light_layers": [0], "light_share": 0.3, "interval": 20}
    ours = transform(model, compile="eager", **options)
    cache = ours.new_cache()
    logits = [ours(part, past_key_values=cache).logits for part in (text[:, :110], *text[:, 110:-1].split(1, dim=1))]
    full = model(text).logits[0, -predicted - 1 : -1].log_softmax(dim=-1)
    kl = divergences(torch.cat(logits, dim=1)[0].double().log_softmax(dim=-1), full).mean()
    assert loss.kl == pytest.approx(float(kl), rel=1e-3)


@pytest.mark.parametrize(
    ("layers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0-2,5"), ((1, 3, 4), "1,3-4")], ids=str
)
def test_layers_are_written_as_they_are_read(layers, text):
    assert ranges(layers) == text
    assert not layers or layer_numbers(text) == layers


@pytest.mark.parametrize(("family", "layer"), [("llama", 7), ("gemma3", 0)], ids=["none", "a window"])
def test_light_layers_that_there_are_not_are_refused(family, layer, prompt):
    chosen = choose([candidate(f"ours:light_layers={layer}")], [60])
    with pytest.raises(ConfigError, match=f"light_layers: {layer} is no layer without a sliding window"):
        predict(Reader(tiny_model(family), **PROTECTED), "a", 0, prompt(90), 10, chosen)


def test_a_model_of_windows_has_no_layers_to_choose():
    model = tiny_model("gemma3", layer_types=["sliding_attention", "sliding_attention", "full_attention"])
    with pytest.raises(InputError, match="1 layers without a sliding window"):
        losses(Reader(model, **PROTECTED), {}, 5, 0.3, lambda *_: None)
