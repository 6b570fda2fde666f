"""The evaluation: prompts of exact lengths, what methods keep, and what a run of all of it says."""

import itertools
import json
import string

import pytest
import torch
from conftest import tiny_model
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from ckv_compile import cli, render
from ckv_compile.errors import ConfigError, InputError
from ckv_compile.evaluation import evaluate, harness, methods, tasks
from ckv_compile.evaluation.harness import FULL, OURS, Compression, Outcome, Reader, predict, run, summarise, wilson
from ckv_compile.evaluation.methods import METHODS, Keep, Layer

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SINK, RECENT = 2, 6
PROTECTED = {"n_sink": SINK, "n_recent": RECENT}
EVICTING = [name for name in METHODS if name not in (FULL, "kmeans")]


def tokenizer(template=TEMPLATE):
    """A token a character, so that a prompt can be read and its length counted."""
    characters = {character: i for i, character in enumerate(string.printable)}
    tokenizer = Tokenizer(models.BPE(characters, [], unk_token="\x0c"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="\x0c", chat_template=template)


def layer(tokens=40, heads=4, kv_heads=2, dim=8, softcap=0.0, sinks=None):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, tokens, dim, generator=generator) for n in (heads, kv_heads, kv_heads))
    return Layer(q, k, v, dim**-0.5, softcap, sinks)


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
        assert sample.answers != tasks.make(kind, characters, length, depth, seed + 1).answers


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
        places = [context.index(f"VAR {name} =") for name in sample.answers]
        assert places == sorted(places)


def test_counted_words_are_the_most_frequent():
    for kind in ("common-words", "frequent-words"):
        sample = tasks.make(kind, tokenizer(), 2000, 0.0, seed=0)
        words = tokenizer().decode(sample.context).split("\n")[1].split()
        ranked = sorted({*words}, key=words.count, reverse=True)
        assert {*sample.answers} == {*ranked[: len(sample.answers)]}


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


@pytest.mark.parametrize("name", METHODS)
def test_a_method_keeps_its_budget_and_what_is_protected(name):
    given = layer()
    slots = METHODS[name](given, Keep(20, SINK, RECENT))
    count = 40 if name == FULL else 20
    assert slots.keys.shape == slots.values.shape == (2, count, 8)
    assert slots.degree.sum(dim=1).tolist() == [40.0 if name in (FULL, "kmeans") else 20.0] * 2
    for kept, exact in ((slots.keys, given.k), (slots.values, given.v)):
        assert torch.equal(kept[:, :SINK], exact[:, :SINK])
        assert torch.equal(kept[:, -RECENT:], exact[:, -RECENT:])


@pytest.mark.parametrize("name", EVICTING)
def test_evicting_methods_keep_tokens_in_order_with_their_values(name):
    given = layer()
    slots = METHODS[name](given, Keep(20, SINK, RECENT))
    for head in range(2):
        where = [next(i for i in range(40) if torch.equal(given.k[head, i], key)) for key in slots.keys[head]]
        assert where == sorted({*where})
        assert torch.equal(slots.values[head], given.v[head, where])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("budget", [40, 50])
def test_a_budget_of_all_tokens_keeps_them(name, budget):
    given = layer()
    slots = METHODS[name](given, Keep(budget, SINK, RECENT))
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
    kept = METHODS[name](given, Keep(SINK + RECENT + 1, SINK, RECENT)).keys[:, SINK]
    if name == "snapkv":  # whose neighbours share its score, the first of them first
        torch.testing.assert_close(kept, given.k[:, 7])
    else:
        torch.testing.assert_close(kept, given.k[:, 10])


def test_streaming_keeps_the_latest():
    given = layer()
    assert torch.equal(METHODS["streaming"](given, Keep(20, SINK, RECENT)).keys[:, SINK:], given.k[:, -20 + SINK :])


def test_kmeans_finds_clusters_of_equal_keys():
    given = layer()
    kinds = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)) * 10
    members = torch.arange(SINK, 40 - RECENT) % 32 // 8  # 8 of each kind
    given.k[:, SINK:-RECENT] = kinds[:, members]
    slots = METHODS["kmeans"](given, Keep(SINK + 4 + RECENT, SINK, RECENT))
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
    slots = METHODS["kmeans"](given, Keep(20, SINK, RECENT))
    assert slots.degree.sum(dim=1).tolist() == [40.0, 40.0]
    assert bool((slots.degree == 0).any() & slots.keys.isfinite().all() & slots.values.isfinite().all())


def test_attention_is_that_of_the_model_by_blocks():
    given = layer(tokens=7, softcap=2.0, sinks=torch.tensor([0.5, -1.0, 0.0, 2.0]))
    whole = methods._attention(given, 0, 7)
    parts = [methods._attention(given, start, start + 3) for start in (0, 3, 6)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    scores = 2.0 * torch.tanh(given.q @ given.k.repeat_interleave(2, dim=0).mT * given.scale / 2.0)
    weights = scores.exp().tril()
    weights = weights / (weights.sum(dim=-1, keepdim=True) + given.sinks.exp()[:, None, None])
    torch.testing.assert_close(whole, weights.view(2, 2, 7, 7).mean(dim=1))


@torch.no_grad()
def test_a_budget_of_the_whole_prompt_is_the_model_itself(prompt):
    model, text = tiny_model("gpt-oss"), prompt(90)
    compressions = [Compression(name, 80) for name in (OURS, *METHODS)]
    expected = torch.nn.functional.cross_entropy(model(text).logits[0, -11:-1], text[0, -10:]).exp()
    for quality in predict(model, text, compressions, 10, **PROTECTED):
        assert abs(quality.kl) < 1e-5
        assert quality.agreement == 1.0
        assert quality.perplexity == pytest.approx(float(expected), rel=1e-3)


def test_ours_is_the_product(prompt):
    model, text = tiny_model("gemma2"), prompt(150)
    (found,) = predict(model, text, [Compression(OURS, 50)], 10, **PROTECTED)
    (expected,) = evaluate(model, text, [50], 10, interval=14, **PROTECTED)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert found.kl > 1e-3


def test_rows_of_a_reader_hold_what_their_methods_kept(prompt):
    reader = Reader(tiny_model("gemma2"), 100, **PROTECTED, max_batch_size=4)
    text = prompt(80)
    compressions = [Compression(name, slots) for name in (OURS, *METHODS) for slots in (30, 50)]
    logits, (short, long) = reader.prefill(text, [60, 80], compressions)
    assert torch.equal(logits, reader.model(text).logits)
    whole = reader.model.new_cache()
    reader.model(text[:, :60], cache=whole)
    for (name, slots), row in zip(compressions, short, strict=True):
        assert (int(row.fill), int(row.position)) == (60 if name == FULL else slots, 60)
        expected = 60.0 if name in (OURS, FULL, "kmeans") else slots
        assert row.degree.sum(dim=-1).flatten().tolist() == pytest.approx([expected] * 3)
        assert torch.equal(row.window_keys, whole.state.window_keys)
        torch.testing.assert_close(row.keys[0, :, :, :SINK], whole.state.keys[0, :, :, :SINK])
    batches = list(reader.batches(long))
    assert [cache.batch_size for cache in batches] == [4] * 5
    # A row reads the turn and generates as it does alone.
    turn = prompt(5, seed=1)
    replies = reader.reply(long, turn, None, 6)
    assert [len(reply) for reply in replies] == [6] * len(compressions)
    for i in (0, 7, 19):
        assert reader.reply(long[i : i + 1], turn, None, 6) == replies[i : i + 1]


SCRIPT = {  # what each method replies to the first prompt and to the second
    (FULL, None): ("right", "right"),
    (OURS, 0.5): ("right", "wrong"),
    ("tova", 0.5): ("wrong", "wrong"),
}


def test_a_run_scores_what_is_replied(monkeypatch):
    seen = []

    class Scripted:
        def __init__(self, model, longest, **options):
            seen.append((longest, options))

    def replies(reader, tokenizer, sample, protocols, compressions):
        turn = len(seen) - 1
        seen.append([(each.method, each.slots) for each in compressions])
        for protocol in protocols:
            said = {"right": f"It is {sample.answers[0]}.", "wrong": "It is 12."}
            yield protocol, [said[each[turn]] for each in SCRIPT.values()]

    monkeypatch.setattr(harness, "Reader", Scripted)
    monkeypatch.setattr(harness, "_replies", replies)
    outcomes = list(
        run(
            None,
            tokenizer(),
            ["needle"],
            [OURS, "tova", FULL, OURS],
            [0.5],
            lengths=[400],
            depths=[0.2, 0.9],
            samples=2,
            protocols=["after"],
            n_sink=2,
        )
    )
    assert seen == [(415 + 1, {"n_sink": 2}), *[[(FULL, 400), (OURS, 200), ("tova", 200)]] * 2]
    assert [[(each.method, each.depth, each.seed, each.score) for each in found] for found in outcomes] == [
        [(FULL, 0.2, 0, 1.0), (OURS, 0.2, 0, 1.0), ("tova", 0.2, 0, 0.0)],
        [(FULL, 0.9, 1, 1.0), (OURS, 0.9, 1, 0.0), ("tova", 0.9, 1, 0.0)],
    ]
    rows = summarise(itertools.chain(*outcomes))
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

    rows = summarise(outcomes("uuid", [1.0, 1.0, 0.0]) + outcomes("recall", [1.0, 0.5, 1.0]))
    assert [(row.task, row.says_something) for row in rows] == [("uuid", False)] * 2 + [("recall", True)] * 2


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


@pytest.mark.parametrize(
    ("compression", "options", "message"),
    [
        (Compression("snap", 50), {}, "method 'snap': choose among ours, full"),
        (Compression("tova", 50), {"interval": 8}, "interval=8"),
        (Compression("tova", 20), {}, "budget=20 slots cannot hold"),
        (Compression("tova", 50), {"n_sinks": 4}, "unknown option 'n_sinks'"),
    ],
    ids=["method", "interval", "budget", "option"],
)
def test_what_cannot_be_compared_is_refused(compression, options, message, prompt):
    with pytest.raises(ConfigError, match=message):
        next(predict(tiny_model(), prompt(100), [compression], 10, **options))


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
    assert (OURS, *METHODS) == cli.METHODS


def test_eval_runs_methods_on_tasks(tiny):
    arguments = (tiny, "--task", "recall", "--task", "needle", "--method", "kmeans", "--method", "tova")
    arguments += ("--budget", "50%", "--budget", 100, "--length", 500, "--samples", 1, "--depth", 0.5)
    result = ckv(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    keys = [(row["task"], row["protocol"], row["method"], row["budget"]) for row in document["rows"]]
    kept = [(FULL, None), ("kmeans", 0.5), ("kmeans", 100), ("tova", 0.5), ("tova", 100)]
    assert keys == [
        (task, protocol, *each) for task in ("recall", "needle") for protocol in ("inside", "after") for each in kept
    ]
    assert len(document["outcomes"]) == len(keys)
    assert {row["depth"] for row in document["outcomes"]} == {0.5}


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


def test_eval_compares_methods_on_a_text(tiny):
    result = ckv(tiny, "--context", 200, "--tokens", 10, "--budget", 60, "--method", "ours", "--method", "h2o")
    assert result.exit_code == 0, result.stderr
    rows = [line.split()[:5] for line in result.stdout.splitlines()]
    assert [row[:2] for row in rows] == [["method", "kept"], ["full", "100%"], ["ours", "60"], ["h2o", "60"]]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--length", 300], 2, "--length is for tasks: add a --task"),
        (["--task", "needle", "--context", 300], 2, "--context is for a text: leave --task out"),
        (["--task", "haystack"], 2, "haystack"),
        (["--task", "needle", "--length", 300, "--budget", 20], 1, "budget=20 slots cannot hold"),
        (["--method", "tova", "--interval", 8, "--context", 200, "--tokens", 10], 1, "interval=8"),
    ],
    ids=["length", "context", "task", "budget", "interval"],
)
def test_eval_names_what_is_wrong(arguments, code, message, tiny):
    result = ckv(tiny, *arguments)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.replace("│", " ").split())
