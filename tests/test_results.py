"""docs/results.md is what docs/results.py makes of the outcomes beside it, and says of claims what they show."""

import importlib
import json
from pathlib import Path

import pytest

from ckv_compile.evaluation import cost
from ckv_compile.evaluation.outcomes import Log, Outcome, TextOutcome

DOCS = Path(__file__).parent.parent / "docs"
SETTINGS = {
    "model": "tiny",
    "dtype": "float32",
    "shape": {"kv_heads": 3, "head_dim": 64, "itemsize": 4},
    "torch": "2",
    "transformers": "5",
    "python": "3",
    "context": 100,
    "tokens": 10,
}
PAPER = "ours:exact=0.0,r_init=0.25"
ABOUT = {"date": "2026-01-02", "cpu": "a CPU", "threads": 1}


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("results")


def written(folder, name, outcomes):
    log = Log(folder / name, SETTINGS, ABOUT)
    for i, each in enumerate(outcomes):
        log.add([i], [each._asdict()])


def asked(task, method, budget, scores):
    return [Outcome(task, 900, 0.5, 10_000 + i, "after", method, budget, score, "") for i, score in enumerate(scores)]


def predicted(method, kls):
    return [TextOutcome("text", i, method, 0.5, 1.0, kl, 0.9, [kl] * 8) for i, kl in enumerate(kls)]


def verdicts(results, folder):
    files, numbers = results.read(folder)
    return {claim.paper: claim for claim in results.claims(results.joined(files), numbers)}


def claim(found, words):
    (claim,) = [claim for paper, claim in found.items() if words in paper]
    return claim


def test_the_page_is_that_of_the_outcomes(results):
    assert (DOCS / "results.md").read_text() == results.page(), "run `python docs/results.py --write docs/results.md`"
    assert (DOCS / "results" / results.PLOT).stat().st_size < 300_000


def test_nothing_is_said_of_what_was_not_measured(results, tmp_path):
    assert {claim.verdict for claim in verdicts(results, tmp_path).values()} == {"not measured", "not testable here"}
    assert "## Tasks" not in results.page(tmp_path)


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ([1.0] * 30, "reproduced"),
        ([0.0] * 30, "not reproduced"),
        ([1.0, 0.0] * 15, "not reproduced"),
        ([1.0] * 27 + [0.0] * 3, "undecided: too few samples"),
    ],
    ids=["best", "nothing", "half", "near"],
)
def test_a_method_is_compared_with_the_best_other_one(ours, verdict, results, tmp_path):
    full = asked("needle", "full", None, [1.0] * 30)
    written(
        tmp_path, "tasks.jsonl", full + asked("needle", PAPER, 0.25, ours) + asked("needle", "h2o", 0.25, [0.1] * 30)
    )
    written(tmp_path, "tasks.peer.jsonl", asked("needle", "peer", 0.25, [1.0] * 30))
    found = verdicts(results, tmp_path)
    for words in ("RULER", "S-NIAH-1"):
        assert claim(found, words).verdict == verdict
        assert "to peer" in claim(found, words).found
    page = results.page(tmp_path)
    assert "| peer | 25 %" in " ".join(page.split())
    assert page.count("### 900 tokens, question after") == 1


def test_the_default_stands_beside_the_best_other_method(results, tmp_path):
    scores = {"ours": 0.9, "tova": 0.5, "ours:exact=0.5": 1.0}
    asked_of = [each for method, score in scores.items() for each in asked("needle", method, 0.5, [score] * 30)]
    written(tmp_path, "tasks.jsonl", asked("needle", "full", None, [1.0] * 30) + asked_of)
    kls = {"ours": [0.1, 0.2, 0.3], "tova": [0.2, 0.3, 0.4], "h2o": [0.5, 0.5, 0.5]}
    written(tmp_path, "texts.jsonl", [each for method, found in kls.items() for each in predicted(method, found)])
    page = " ".join(results.page(tmp_path).split())
    assert "| score, 900 tokens, question after | 50 % | ours | 0.90 | tova | 0.50 | +0.40 ± 0.00 |" in page
    assert "| 50 % | ours | 0.200 | tova | 0.300 | -0.100 ± 0.000 |" in page


def test_tasks_that_a_model_was_trained_on_are_no_claim_on_ruler(results, tmp_path):
    scores = {"ours": 0.9, PAPER: 0.0, "tova": 0.5}
    asked_of = [each for method, score in scores.items() for each in asked("records", method, 0.5, [score] * 30)]
    written(tmp_path, "small_model.jsonl", asked("records", "full", None, [1.0] * 30) + asked_of)
    assert claim(verdicts(results, tmp_path), "RULER").verdict == "not measured"
    page = " ".join(results.page(tmp_path).split())
    assert "| score, records (trained on), 900 tokens, question after | 50 % | ours | 0.90 | tova | 0.50 |" in page


def test_light_layers_are_named_once_and_compared_as_ours(results, tmp_path):
    light = "light_layers=0-4+9,light_share=0.35"
    scores = {"ours": 0.6, f"ours:{light}": 0.9, "tova": 0.5, f"tova:{light}": 0.8}
    asked_of = [each for method, score in scores.items() for each in asked("needle", method, 0.5, [score] * 30)]
    written(tmp_path, "tasks.jsonl", asked("needle", "full", None, [1.0] * 30) + asked_of)
    losses = [{"layer": layer, "kl": kl} for layer, kl in enumerate([0.1, 0.6, 0.2, 0.1])]
    layers = {"losses": losses, "light_layers": [0, 3], "model": "tiny", "texts": ["a"]}
    layers |= {"context": 100, "tokens": 10, "windows": 2, "share": 0.25}
    (tmp_path / "layers.json").write_text(json.dumps(layers))
    page = " ".join(results.page(tmp_path).split())
    assert page.count(f'"+ light layers" stands for `{light}`') == page.count(light) == 1
    assert "| 50 % | ours + light layers | 0.90 | tova | 0.50 | +0.40 ± 0.00 |" in page
    assert "| 50 % | ours | 0.60 | tova | 0.50 | +0.10 ± 0.00 |" in page
    assert "| tova + light layers | 50 %" in page
    assert "| 50 % | ours + light layers | 0.90 | tova + light layers | 0.80 | +0.10 ± 0.00 |" in page
    assert "Layer 1 makes 60% of the sum, and the 2 layers that lose least (bold) 20.0%." in page


def test_ablations_stand_apart_by_what_they_change(results, tmp_path):
    kls = {"csm": [0.1, 0.2, 0.3], "csm-contiguous": [0.3, 0.4, 0.5], "ours:r_init=0.5": [0.1, 0.1, 0.1]}
    written(tmp_path, "ablations.jsonl", [each for method, found in kls.items() for each in predicted(method, found)])
    scores = {"csm": [1.0] * 4, "csm-contiguous": [0.0, 1.0] * 2, "full": [1.0] * 4}
    written(
        tmp_path,
        "ablations-tasks.jsonl",
        [
            each
            for method, found in scores.items()
            for each in asked("needle", method, None if method == "full" else 0.5, found)
        ],
    )
    page = " ".join(results.page(tmp_path).split())
    assert "### partition" in page
    assert "### rounds" not in page  # a single one compares with nothing
    assert "| csm | 1.000 | 0.200 |" in page
    assert "| csm-contiguous | 0.500 (-0.500 ± 0.919) | 0.400 (+0.200 ± 0.000) |" in page
    assert "## Tasks" not in page
    assert "## Texts" not in page
    assert claim(verdicts(results, tmp_path), "partition").verdict == "undecided: too few samples"


def test_scores_by_depth(results, tmp_path):
    thirds = [
        each._replace(depth=depth)
        for method, scores in {"full": [1.0, 1.0, 1.0], "ours": [1.0, 0.0, 0.5]}.items()
        for depth, score in zip((0.2, 0.5, 1.0), scores, strict=True)
        for each in asked("needle", method, None if method == "full" else 0.5, [score])
    ]
    written(tmp_path, "tasks.jsonl", thirds)
    assert "| ours | 50 % | 1.00 | 0.00 | 0.50 |" in " ".join(results.page(tmp_path).split())


def test_speeds_stand_in_the_page_and_beside_the_claims(results, tmp_path):
    spread = {"median": 0.2, "low": 0.1, "high": 0.3}
    row = {"context": 2048, "batch": 1, "kind": "dynamic", "name": "dynamic", "kept": None, "failed": None}
    row |= {"prefill_s": spread, "compression_s": None, "step_s": spread, "tokens_per_s": 5.0, "floor_s": 0.1}
    row |= {"peak_bytes": None, "cache_bytes": 10**6, "compile_cold_s": None, "compile_warm_s": None}
    fast = row | {"kind": "ours", "name": "ours", "kept": 0.25, "step_s": spread | {"median": 0.05}}
    broken = row | {"kind": "ours", "name": "ours", "kept": 0.5, "failed": "it broke"}
    machine = {"name": "a CPU", "threads": 2, "torch": "2", "transformers": "5", "date": "2026-01-02"}
    speed = {"model": "tiny", "machine": machine, "dtype": "float32", "own_context": 1024, "tokens": 8, "rounds": 2}
    (tmp_path / "speed.json").write_text(json.dumps(speed | {"rows": [row, fast, broken]}))
    rows = [
        {
            "engine": engine,
            "requests": 24,
            "states": 5,
            "running": 5.0,
            "steps": 9,
            "preemptions": 0,
            "seconds": seconds,
        }
        | {"cpu_seconds": seconds, "tokens_per_s": 1.0, "first_token_s": 1.0, "token_ms": 1.0}
        for engine, seconds in (("vLLM", 30.0), ("vLLM with ckv_compile", 20.0))
    ]
    serving = {"model": "tiny", "dtype": "float32", "machine": "a CPU", "threads": 2, "torch": "2", "eager": True}
    serving |= {"whole": False, "prompt": 9, "tokens": 8, "memory": 2**20, "ckv": {"budget": 4}, "rows": rows}
    (tmp_path / "serving.json").write_text(json.dumps(serving))
    page = " ".join(results.page(tmp_path).split())
    assert "context 2,048 (beyond the model, for speed alone), batch 1" in page
    assert "ours, 50%, context 2,048, batch 1: it broke" in page
    assert "| vLLM with ckv_compile |" in page
    found = verdicts(results, tmp_path)
    assert (
        "at most 4.0 times transformers' default (2,048 tokens, 1 row, float32, 25 % kept)"
        in claim(found, "1.92").found
    )
    assert "at most 1.5 times (24 requests, replies of 8, the same bytes)" in claim(found, "vLLM").found


def test_claims_on_strings_memory_and_partitions(results, tmp_path):
    strings = asked("uuid", "full", None, [1.0] * 9) + asked("uuid", PAPER, 0.25, [0.0] * 8 + [1.0])
    written(tmp_path, "tasks.jsonl", strings)
    kls = {"csm": [0.1, 0.2, 0.3], "csm-contiguous": [0.3, 0.4, 0.5], "csm-random": [0.2, 0.3, 0.35]}
    written(tmp_path, "texts.jsonl", [each for method, found in kls.items() for each in predicted(method, found)])
    found = verdicts(results, tmp_path)
    assert claim(found, "UUIDs")[1:] == ("reproduced", "25 %, 900 tokens, after: -0.89 ± 0.26 to the full cache")
    assert claim(found, "less memory")[1:] == ("reproduced", "74.8% at a budget of 25 %, degrees included")
    assert claim(found, "partition")[1] == "reproduced"
    assert "KL over 10 tokens, 50 %: contiguous +0.200 ± 0.000" in claim(found, "partition").found
    scores = {"csm": [0.1, 0.2, 0.3], "csm-contiguous": [0.3, 0.4, 0.5]}
    replies = [each for method, found in scores.items() for each in asked("needle", method, 0.25, found)]
    written(tmp_path, "ablations.jsonl", asked("needle", "full", None, [1.0] * 3) + replies)
    assert claim(verdicts(results, tmp_path), "partition")[1] == "not reproduced"
    assert "score after, 25 %: contiguous +0.200 ± 0.000" in claim(verdicts(results, tmp_path), "partition").found
    results.draw(tmp_path)
    assert (tmp_path / results.PLOT).read_bytes().startswith(b"\x89PNG")


def test_the_cost_of_clustering_is_measured_and_judged(results, tmp_path, capsys):
    cost.main(["--lengths", "64", "128", "--rounds", "1", "--json", str(tmp_path / "cost.json")])
    assert "| all pairs" in capsys.readouterr().out
    measured = json.loads((tmp_path / "cost.json").read_text())
    assert [len(row["seconds"]) for row in measured["rows"]] == [2, 2, 2]
    for row, slope in zip(measured["rows"], (1.0, 2.0, 2.1), strict=True):
        row |= {"slope": slope, "seconds": [slope, slope]}
    (tmp_path / "cost.json").write_text(json.dumps(measured))
    assert claim(verdicts(results, tmp_path), "O(n c d)").verdict == "reproduced"
    assert "## Cost of clustering" in results.page(tmp_path)
