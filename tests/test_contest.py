"""The contest: its numbers from canned answers, and a tiny model in this process and in one of its own."""

import functools
import json

import pytest
import torch
from conftest import tiny_model
from test_cli import ckv
from transformers import CompileConfig

from ckv_compile import cli, peers
from ckv_compile.benchmark import contest, contestants, timing, worker
from ckv_compile.errors import ConfigError, InputError, PeerError
from ckv_compile.peers import NOT_INSTALLED

CONTEXT = 150
HOW = {"tokens": 6, "rounds": 2, "dtype": "float32", "device": "cpu", "threads": None, "compile": "eager"}
TOKEN_BYTES = 3 * 3 * 2 * 8 * 4  # layers, KV heads, keys and values, head size, float32
SLOT_BYTES = TOKEN_BYTES + 3 * 3 * 4  # and its degrees
INT8_BYTES = TOKEN_BYTES // 4 + 3 * 3 * 4 * 3  # and the steps of keys and values too


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """That of a tiny model."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """No peers are installed, and bandwidth is measured in little memory."""
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(timing, "BANDWIDTH_BYTES", 2**20)


def run(source, **how):
    return contest.contest(source, **{"batches": [1], "budgets": [], "progress": lambda done, total: None} | HOW | how)


@pytest.fixture
def canned(monkeypatch):
    """Contestants of this environment answer at once; returns what they are asked, in its order."""
    asked = []

    class Canned:
        def __init__(self, command, environment):
            assert command[-1] == worker.__name__
            self.folder, self.runs = environment["TORCHINDUCTOR_CACHE_DIR"], 0

        def ask(self, do, **job):
            if do == "prepare":
                self.budget, self.batch = job.get("budget"), len(job["prompt"])
                warm = ("prepare", self.folder) in [each[:2] for each in asked]
                asked.append((do, self.folder, job["kind"]))
                return {"weights_bytes": 10**6, "compile_s": None if job["kind"] == "dynamic" else 3.0 if warm else 9.0}
            asked.append((do, self.folder, None))
            if self.budget == 64 and self.batch == 2:
                raise PeerError("measure ended its process with code -9: it said nothing")
            self.runs += 1
            return {
                "prefill_s": 2.0 * self.runs + (0.5 if self.budget == 64 else 0.0),
                "steps_s": [100.0, 100.0, 0.1, 0.2, 0.3],
                "cache_bytes": 500,
                "peak_bytes": 7,
            }

        def close(self):
            asked.append(("close", self.folder, None))

    monkeypatch.setattr(contest, "Worker", Canned)
    return asked


def test_the_command_knows_all_contestants():
    assert cli.CONTESTANTS == contestants.KINDS


def test_runs_are_interleaved_and_summed_up(canned, folder):
    document = run(folder, contexts=[CONTEXT], kinds=("dynamic", "ours"), budgets=[64], rounds=3, interval=8)
    measured = [path.rpartition("/")[2] for do, path, _ in canned if do == "measure"]
    assert measured == ["dynamic-None", "ours-None", "ours-64"] * 3
    dynamic, whole, kept = document["rows"]
    assert dynamic["prefill_s"] == {"median": 4.0, "low": 2.0, "high": 6.0}
    assert dynamic["step_s"] == {"median": 0.2, "low": 0.1, "high": 0.3}  # without the first two of each run
    assert dynamic["tokens_per_s"] == 5.0
    assert (dynamic["compression_s"], whole["compression_s"], kept["compression_s"]) == (None, None, 0.5)
    assert dynamic["floor_s"] * 1e15 > dynamic["weights_bytes"] + dynamic["cache_bytes"] == 10**6 + 500
    assert canned[-3:] == [("close", path, None) for path in (canned[-3][1], canned[-2][1], canned[-1][1])]


def test_compile_times_are_those_of_the_first_cell_cold_and_warm(canned, folder):
    document = run(folder, contexts=[CONTEXT, 100], kinds=("dynamic", "static", "ours"))
    times = [(row["context"], row["kind"], row["compile_cold_s"], row["compile_warm_s"]) for row in document["rows"]]
    assert times == [
        (CONTEXT, "dynamic", None, None),
        (CONTEXT, "static", 9.0, 3.0),
        (CONTEXT, "ours", 9.0, 3.0),
        *((100, kind, None, None) for kind in ("dynamic", "static", "ours")),
    ]


def test_bench_shows_saves_and_draws_what_was_measured_and_says_what_is_missing(canned, folder, tmp_path):
    file, pictures = tmp_path / "result.json", tmp_path / "pictures"
    arguments = ("bench", folder, "--context", CONTEXT, "--batch", 1, "--batch", 2, "--budget", 64, "--interval", 8)
    result = ckv(*arguments, "--tokens", 6, "--rounds", 1, "--save", file, "--plots", pictures)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [(row["name"], row["kept"], row["failed"]) for row in rows if row["batch"] == 1 and row["failed"]] == [
        ("kvpress, snapkv", 64, NOT_INSTALLED),
        ("kvpress, knorm", 64, NOT_INSTALLED),
        ("llama.cpp, as shipped", None, "it needs a GGUF file"),
        ("llama.cpp, float32", None, "it needs a GGUF file"),
    ]
    failed = rows[-1]
    assert (failed["name"], failed["batch"], "step_s" in failed) == ("ckv_compile, int8", 2, False)
    shown = " ".join(result.stdout.split())
    for text in (
        "context 150, batch 2",
        "ckv_compile, full cache 2.00 (2.00 - 2.00) - 200.0 (100.0 - 300.0) 10.0",
        "ckv_compile, int8, full cache 2.00 (2.00 - 2.00) - 200.0 (100.0 - 300.0) 10.0",
        "kvpress, snapkv, 64 slots not installed: make peers",
        "ckv_compile, 64 slots, context 150, batch 2: measure ended its process with code -9",
    ):
        assert text in shown
    names = {f"{name}-batch{batch}.png" for batch in (1, 2) for name in ("memory", "time")}
    assert {path.name for path in pictures.iterdir()} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures.iterdir())


@pytest.mark.parametrize("kind", ["dynamic", "static", "ours", "ours-int8"])
def test_the_contestants_of_this_environment_run(folder, monkeypatch, kind):
    monkeypatch.setattr(worker, "CompileConfig", functools.partial(CompileConfig, backend="eager"))
    torch._dynamo.reset()
    how = {name: value for name, value in HOW.items() if name not in ("rounds", "threads")}
    given = {"prompt": [[5] * CONTEXT] * 2, "tokens": 6, "threads": torch.get_num_threads()}
    caches = {}
    for each in contestants.contestants(folder, kind, CONTEXT, 2, [0.5], **how, interval=8):
        contestant = worker.Contestant()
        ready = contestant.prepare(**json.loads(json.dumps(each.job | given)))
        found = json.loads(json.dumps(contestant.measure()))
        assert ready["weights_bytes"] > 0
        assert (ready["compile_s"] is None) == (kind == "dynamic")
        assert found["prefill_s"] > 0
        assert [seconds > 0 for seconds in found["steps_s"]] == [True] * 5
        caches[each.kept] = found["cache_bytes"] / 2
    seen = (CONTEXT + 5) * TOKEN_BYTES  # the last token is not read
    queries = 9 * TOKEN_BYTES  # two means, as large as a token, and the last 8 of two heads
    slot = INT8_BYTES if kind == "ours-int8" else SLOT_BYTES
    ours = {None: (CONTEXT + 6 + 8) * slot + queries, 0.5: (75 + 8) * slot + queries}
    assert caches == (ours if kind.startswith("ours") else {None: seen})


def test_a_contestant_has_a_process_of_its_own(folder):
    seen = []
    (row,) = run(
        folder,
        contexts=[CONTEXT],
        batches=[2],
        kinds=("dynamic",),
        progress=lambda done, total: seen.append((done, total)),
    )["rows"]
    assert row["failed"] == ""
    assert row["cache_bytes"] == 2 * (CONTEXT + 5) * TOKEN_BYTES
    assert row["peak_bytes"] is None or row["peak_bytes"] > row["cache_bytes"]
    assert seen == [(1, 3), (2, 3), (3, 3)]  # its start, and two rounds


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokens": 3}, InputError, "tokens=3, rounds=2: generate at least 4 tokens"),
        ({"rounds": 0}, InputError, "rounds=0"),
        ({"kinds": ("vllm",)}, InputError, "contestant 'vllm': choose among dynamic, static"),
        ({"budgets": [8]}, ConfigError, "budget=8 slots cannot hold"),
        ({"intervall": 8, "budgets": [64]}, ConfigError, "did you mean 'interval'"),
    ],
    ids=["tokens", "rounds", "contestant", "budget", "option"],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(changes, error, message):
    with pytest.raises(error, match=message):
        run("missing", contexts=[CONTEXT], **changes)
