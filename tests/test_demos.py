"""The demos in short form: what they compute, what they write, and those of a given model once on the real one."""

import importlib
import itertools
import json
import pydoc_data.topics
import re
import struct
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import cache_of, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import ckv_compile

DEMOS = Path(__file__).parent.parent / "demos"
TEXT = 'if a < b && "c" > d:\n\t<span data-slot="0">&amp;\n' * 20


class Letters:
    """A tokenizer whose tokens are ASCII letters and whose text is always `TEXT`."""

    def __call__(self, text, return_tensors):
        return SimpleNamespace(input_ids=torch.tensor([[ord(letter) for letter in TEXT]]))

    def decode(self, tokens):
        return "".join(map(chr, tokens))


@pytest.fixture
def similarity(monkeypatch):
    monkeypatch.syspath_prepend(DEMOS)
    return importlib.import_module("similarity")


@pytest.fixture
def clusters(monkeypatch):
    monkeypatch.syspath_prepend(DEMOS)
    return importlib.import_module("clusters")


@pytest.fixture
def small_model(monkeypatch):
    monkeypatch.syspath_prepend(DEMOS)
    return importlib.import_module("small_model")


# ------------------------------------------------------------------------------------------------------- similarity


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_keys_before_rope_are_those_that_rope_turns_into_the_cached_ones(family, similarity, prompt):
    model = tiny_model(family)
    cached, before = similarity.read_keys(model, prompt(30))
    assert len(cached) == len(before) == 3
    cosine, sine = model.model.rotary_emb(cached[0], torch.arange(30)[None])
    for keys, plain in zip(cached, before, strict=True):
        assert keys.shape == (model.config.num_key_value_heads, 30, keys.shape[2])
        torch.testing.assert_close(apply_rotary_pos_emb(plain[None], plain[None], cosine, sine)[1][0], keys)


def test_layers_with_a_window_keep_all_their_keys_and_fused_projections_have_none_before_rope(similarity, prompt):
    cached, before = similarity.read_keys(tiny_model("gemma3"), prompt(60))  # windows of 20 tokens
    assert [keys.shape for keys in (*cached, *before)] == [(3, 60, 16)] * 6
    config = AutoConfig.for_model("gpt2", vocab_size=128, n_embd=48, n_layer=2, n_head=6)
    cached, before = similarity.read_keys(AutoModelForCausalLM.from_config(config).eval(), prompt(60))
    assert ([keys.shape for keys in cached], before) == ([(6, 60, 8)] * 2, [])


def test_mean_cosines_are_means_over_all_pairs_of_a_distance(similarity):
    keys = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0)) + 0.5
    found = similarity.mean_cosines(keys)
    assert found.shape == (2, 40)
    for distance in (0, 1, 7, 39):
        pairs = torch.cosine_similarity(keys[:, distance:], keys[:, : 40 - distance], dim=-1).double()
        torch.testing.assert_close(found[:, distance], pairs.mean(dim=1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (lambda d: torch.exp(-d / 50), (1, 1, 1, 1)),
        (lambda d: 1 - (d / 1000) ** 2, (1, 0, 1, 1)),  # concave
        (lambda d: torch.exp(-d / 50) + 0.05 * (d % 2), (1, 1, 0, 0.5)),  # zigzag
        (lambda d: d / 1000, (0, 0, 0, 0)),
    ],
    ids=["convex", "concave", "zigzag", "rising"],
)
def test_shares_tell_whether_a_mean_falls(line, expected, similarity):
    cosines = line(torch.arange(200.0, dtype=torch.float64)).expand(2, 3, 200)
    assert similarity.shares(cosines) == pytest.approx(expected, abs=0.02)


def png_size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG file, and that it is one and not blank."""
    from matplotlib import image

    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert image.imread(path)[..., :3].std() > 0.05
    return struct.unpack(">II", data[16:24])


def test_similarity_draws_and_prints(similarity, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(similarity, "load_model", lambda source: (tiny_model(max_position_embeddings=600), Letters()))
    similarity.main(["--tokens", "300", "--out", str(tmp_path / "new")])
    assert png_size(tmp_path / "new" / "similarity-heat-map.png") == (1512, 1008)  # 3 layers, as cached and before RoPE
    assert png_size(tmp_path / "new" / "similarity-distance.png") == (1440, 540)
    printed = capsys.readouterr().out
    assert [printed.count(text) for text in ("\n| 0 ", "\n| 2 ", "\n| 3 ", "of 9 pairs")] == [2, 2, 0, 2]
    with pytest.raises(SystemExit):
        similarity.main(["--tokens", "200"])
    assert "--tokens 200: means at distance 128 need more than 256" in capsys.readouterr().err


@pytest.mark.real_model
def test_similarity_on_the_real_model(similarity, tmp_path, capsys):
    """The first observation holds, the second at these distances: on most heads, not on all."""
    similarity.main(["--tokens", "384", "--out", str(tmp_path)])
    cached, before = capsys.readouterr().out.split("keys before RoPE")
    falls = [float(re.search(r"to the next: ([\d.]+)%", text)[1]) for text in (cached, before)]
    assert 90 < falls[0] <= 100
    assert falls[1] < falls[0]
    near, *_, far = (float(mean) for mean in re.search(r"\n\| all (.*)\|", cached)[1].split("|")[1:])
    assert near > 0.8 > far + 0.1


# --------------------------------------------------------------------------------------------------------- clusters


class Spans(HTMLParser):
    """The tokens of a page: (text, slot, class) in order; and whether every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tokens: list[tuple[str, int, str]] = []
        self.open: list[tuple[str, dict[str, str]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append((tag, dict(attributes)))
        if "data-slot" in dict(attributes):
            assert int(dict(attributes)["data-token"]) == len(self.tokens)
            self.tokens.append(("", int(dict(attributes)["data-slot"]), dict(attributes)["class"]))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and "data-slot" in self.open[-1][1]:
            text, slot, kind = self.tokens[-1]
            self.tokens[-1] = (text + data, slot, kind)


def check_page(path: Path, text: str, slots: int, sinks: int = 4, recent: int = 32) -> None:
    """Every token occurs in order, coloured by how many share its slot; what is protected is alone."""
    spans = Spans(path.read_text(encoding="utf-8"))
    assert not spans.open
    assert "".join(token for token, _, _ in spans.tokens) == text
    degree = Counter(slot for _, slot, _ in spans.tokens)
    assert sorted(degree) == list(range(slots))
    for number, (_, slot, kind) in enumerate(spans.tokens):
        assert kind == f"d{min(5, (degree[slot] - 1).bit_length())}"
        if number < sinks or number >= len(spans.tokens) - recent:
            assert degree[slot] == 1


@pytest.fixture(scope="module")
def ours():
    return ckv_compile.transform(tiny_model(), budget=110, compile="eager")


@torch.no_grad()
def test_the_slots_found_hold_the_means_of_their_tokens(clusters, ours, prompt):
    ids = prompt(300)
    found, degrees = clusters.find_clusters(ours, ids, layer=1)
    assert degrees.shape == (3, 3, 110)
    assert (degrees.sum(dim=-1) == 300).all()
    exact, state = clusters.exact_state(ours, ids).keys[0, 1, :, :-1], cache_of(ours(ids)).state
    for head in range(3):
        member = torch.nn.functional.one_hot(found.slot[head], 110).double()  # [S, n]
        assert torch.equal(member.sum(dim=0), degrees[1, head].double())
        mean = member.T @ exact[head].double() / member.sum(dim=0)[:, None]
        torch.testing.assert_close(state.keys[0, 1, head, :110].double(), mean, rtol=0, atol=1e-5)


def test_slots_that_are_not_those_of_the_cache_are_refused(clusters, ours, monkeypatch, prompt):
    state = clusters.exact_state(ours, prompt(300))
    state.keys[:, :, :, :-1] = state.keys[:, :, :, :-1].flip(3)
    monkeypatch.setattr(clusters, "exact_state", lambda model, ids: state)
    with pytest.raises(RuntimeError, match="layer 1 do not have the degrees of the cache"):
        clusters.find_clusters(ours, prompt(300), layer=1)


def test_clusters_writes_a_page_and_a_summary(clusters, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(clusters, "load_model", lambda source: (tiny_model(), Letters()))
    options = ["--budget", "110", "--out", str(tmp_path)]
    clusters.main(["--tokens", "300", "--layer", "2", "--head", "1", *options])
    check_page(tmp_path / "clusters.html", TEXT[:300], slots=110)
    printed = capsys.readouterr().out
    rows = [line.split("|")[1:-1] for line in printed.splitlines() if line.startswith("| ")][1:]
    assert sum(int(row[1]) for row in rows) == 110
    assert sum(int(row[2]) for row in rows) == 300
    assert "layer 2, KV head 1" in printed
    for wrong, message in (
        (["--tokens", "300", "--layer", "3"], "--layer 3: this model has clustered ones from 0 to 2"),
        (["--tokens", "300", "--head", "-1"], "--head -1: this model has clustered ones from 0 to 2"),
        (["--tokens", "173"], "--tokens 173: nothing is merged below budget [+] interval = 174"),
    ):
        with pytest.raises(SystemExit):
            clusters.main([*wrong, *options])
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.real_model
def test_clusters_on_the_real_model(clusters, tmp_path, capsys):
    clusters.main(["--tokens", "256", "--budget", "128", "--out", str(tmp_path)])
    text = "\n".join(pydoc_data.topics.topics.values())
    spans = Spans((tmp_path / "clusters.html").read_text(encoding="utf-8"))
    assert len(spans.tokens) == 256
    shown = "".join(token for token, _, _ in spans.tokens)
    assert text.startswith(shown)
    check_page(tmp_path / "clusters.html", shown, slots=128)
    assert "256 tokens in 128 slots: layer 15, KV head 0" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------ small model


def test_sequences_ask_for_what_the_keys_had_before(small_model):
    for stage in small_model.STAGES:
        ids, wanted = small_model.sequences(stage, 5, torch.Generator().manual_seed(1))
        assert ids.shape == wanted.shape == (5, stage.length)
        assert ids.max() < small_model.VOCABULARY
        asked = wanted >= 0
        assert asked.any(dim=1).all()
        assert torch.equal(wanted[asked], ids[asked])
        for row, answers in zip(ids.tolist(), wanted.tolist(), strict=True):
            known: dict[int, list[int]] = {}
            for i, token in enumerate(row[:-2]):
                if token < small_model.KEYS:
                    values = row[i + 1 : i + 3]
                    assert known.setdefault(token, values) == values
                    assert answers[i + 1 : i + 3] in (values, [-100, -100])
            assert len(known) <= stage.records


def test_prompts_have_the_record_that_is_asked_at_its_depth(small_model):
    for length, depth in ((49, 0.0), (512, 0.1), (512, 0.9), (300, 1.0)):
        prompt = small_model.prompt(length, depth, seed=3)
        context, (key,) = prompt.sample.context, prompt.sample.question
        assert len(context) + 1 == length
        assert context.count(key) == 1
        place = context.index(key)
        assert place == pytest.approx(depth * (length - 4), abs=0.15 * length)
        assert (small_model.Words().decode(context[place + 1 : place + 3], True),) == prompt.sample.answers
        assert sum(token < small_model.KEYS for token in context) == 16
    assert small_model.prompt(512, 0.5, 4) == small_model.prompt(512, 0.5, 4) != small_model.prompt(512, 0.5, 5)


def test_an_untrained_small_model_says_nothing_and_is_the_same_again(small_model, tmp_path, capsys):
    options = ["--steps", "1", "--length", "304", "--prompts", "2"]
    small_model.main([*options, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "one.jsonl")])
    printed = capsys.readouterr().out
    assert len(re.findall(r"records in \d+ tokens: \d+\.\d% after 1 steps", printed)) == len(small_model.STAGES)
    assert printed.count("so it says nothing: below 70%") == 2
    small_model.main([*options, "--out", str(tmp_path / "two.jsonl")])  # trained again
    again = re.sub(r"\[ *[\d.]+ s\]", "", capsys.readouterr().out)
    assert again == re.sub(r"\[ *[\d.]+ s\]", "", printed)
    small_model.main([*options, "--model", str(tmp_path / "model"), "--out", str(tmp_path / "three.jsonl")])  # loaded
    assert "after 1 steps" not in capsys.readouterr().out
    one, two, three = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("one", "two", "three")
    )
    assert one == two == three
    assert one[0]["settings"]["model"].startswith("a Qwen3 of 2 layers trained on recall")
    compressed = [*itertools.product(small_model.METHODS, small_model.BUDGETS)]
    cells = {(protocol, *cell) for protocol in ("inside", "after") for cell in (("full", None), *compressed)}
    for line, (depth, seed) in zip(one[1:], ((0.1, 10_000), (0.3, 10_001)), strict=True):
        assert line["prompt"] == ["records", 304, depth, seed]
        found = [(each["protocol"], each["method"], each["budget"]) for each in line["outcomes"]]
        assert sorted(map(str, found)) == sorted(map(str, cells))
    with pytest.raises(SystemExit):
        small_model.main(["--length", "303"])
    assert "--length must be at least 304" in capsys.readouterr().err
