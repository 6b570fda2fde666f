"""Processes that are asked over a pipe, and the adapters of peers as far as they go without their environments."""

import importlib
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ckv_compile import cli, peers
from ckv_compile.errors import PeerError
from ckv_compile.evaluation import presses
from ckv_compile.evaluation.tasks import Prompt, Sample
from ckv_compile.peers import Worker, command_of

FOLDER = Path(peers.__file__).parent
PROMPT = {"model": "none", "context": [1, 2, 3], "question": [4], "tokens": 2, "protocol": "inside"}
PRESSES = {"compressions": [["keydiff", 2]]}
TEXT = {"model": "none", "text": [1, 2, 3], "predicted": 1} | PRESSES
BENCH = {"model": "none", "prompt": [[1, 2]], "tokens": 4, "dtype": "float32", "device": "cpu", "threads": 1}
GGUF = {"gguf": "none", "prompt": [[1, 2]], "tokens": 4, "threads": 1, "converted": "none"}


@pytest.fixture(scope="module")
def adapters():
    """The adapters under this interpreter, where they can check what they are asked for, and nothing more."""
    workers = {name: Worker([sys.executable, str(FOLDER / f"{name}_adapter.py")]) for name in ("kvpress", "llama")}
    yield workers
    for worker in workers.values():
        worker.close()


@pytest.mark.parametrize(
    ("adapter", "do", "job", "message"),
    [
        ("kvpress", "compress", {}, "do='compress': choose one of evaluate, predict, prepare, measure"),
        ("kvpress", "evaluate", PROMPT | PRESSES | {"ratio": 0.5}, "unexpected keyword argument 'ratio'"),
        ("kvpress", "evaluate", PROMPT | PRESSES | {"protocol": "before"}, "protocol='before': choose one of inside"),
        ("kvpress", "evaluate", PROMPT | PRESSES | {"tokens": 0}, "tokens=0: generate at least 1"),
        ("kvpress", "evaluate", PROMPT | {"compressions": [["adakv", 2]]}, "press 'adakv': choose among full, keydiff"),
        ("kvpress", "evaluate", PROMPT | {"compressions": [["tova", 5]]}, "slots=5 of 4 tokens: keep at least 1"),
        ("kvpress", "evaluate", PROMPT | {"compressions": [["tova", 0]]}, "slots=0 of 4 tokens: keep at least 1"),
        (
            "kvpress",
            "evaluate",
            PROMPT | {"protocol": "after", "compressions": [["tova", 4]]},
            "slots=4 of 3 tokens",
        ),
        ("kvpress", "evaluate", PROMPT | PRESSES | {"protocol": "after", "question": []}, "it has no tokens"),
        ("kvpress", "predict", TEXT | {"predicted": 3}, "predicted=3 of 3 tokens: predict at least 1, and fewer"),
        ("kvpress", "predict", TEXT | {"predicted": 2}, "slots=2 of 1 tokens"),
        ("kvpress", "prepare", BENCH | {"press": "tova", "slots": 3}, "slots=3 of 2 tokens"),
        ("kvpress", "measure", {}, "nothing is prepared: ask for 'prepare' first"),
        ("llama", "prepare", GGUF | {"dtype": "int8"}, "dtype='int8': choose one of float32, float16, bfloat16"),
        ("llama", "measure", {}, "nothing is prepared: ask for 'prepare' first"),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)
def test_a_job_that_cannot_work_is_refused_before_anything_is_loaded(adapters, adapter, do, job, message):
    with pytest.raises(PeerError) as caught:
        adapters[adapter].ask(do, **job)
    assert str(caught.value).startswith(f"{do} failed: ")
    assert message in str(caught.value)


def test_what_libraries_print_is_no_answer():
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); from serving import serve; "
    code += "serve({'twice': lambda n: print('noise') or {'n': 2 * n}})"
    with Worker([sys.executable, "-c", code]) as worker:
        assert [worker.ask("twice", n=n) for n in (2, 3)] == [{"n": 4}, {"n": 6}]


def test_the_end_of_a_process_is_told_with_its_last_words():
    with (
        Worker([sys.executable, "-c", "import sys; sys.exit('out of memory')"]) as worker,
        pytest.raises(PeerError, match="measure ended its process with code 1: out of memory"),
    ):
        worker.ask("measure")


def test_a_missing_environment_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    assert command_of("kvpress") is None
    with pytest.raises(PeerError, match="kvpress is not installed: make peers"):
        presses.Presses("smollm2", MODEL, None, ["keydiff"], [0.5])


class Told:
    """Stands in for a process of kvpress, and keeps what it was asked."""

    def __init__(self, command):
        self.asked = []

    def ask(self, do, **job):
        self.asked.append((do, job))
        if do == "evaluate":
            return {"replies": [[7, 9] if name == "keydiff" else [8, 9] for name, _ in job["compressions"]]}
        return {"qualities": [{"perplexity": math.e**2, "kl": 0.25, "agreement": 0.5} for _ in job["compressions"]]}


class Words:
    """A tokenizer whose last token ends a reply."""

    eos_token_id = 9

    def decode(self, tokens, **options):
        return " ".join(map(str, tokens))


MODEL = SimpleNamespace(
    dtype=torch.float32, device=torch.device("cpu"), generation_config=SimpleNamespace(eos_token_id=9)
)


def test_presses_get_the_prompts_and_slots_of_our_own_methods(monkeypatch):
    monkeypatch.setattr(presses, "command_of", lambda peer: [peer])
    monkeypatch.setattr(presses, "Worker", Told)
    monkeypatch.setattr(presses, "path_of", lambda source: source)
    asked = presses.Presses("a-model", MODEL, Words(), ["keydiff", "tova"], [0.5, 3])
    prompt = Prompt("needle", 10, 0.5, 1, Sample([1] * 7, [2] * 3, ("7",), 5))
    found = list(asked.replies(prompt, ("inside", "after")))
    assert [(each.protocol, each.method, each.budget, each.score, each.reply) for each in found[:4]] == [
        ("inside", "kvpress:keydiff", 0.5, 1.0, "7"),
        ("inside", "kvpress:keydiff", 3, 1.0, "7"),
        ("inside", "kvpress:tova", 0.5, 0.0, "8"),
        ("inside", "kvpress:tova", 3, 0.0, "8"),
    ]
    assert [each.protocol for each in found[4:]] == ["after"] * 4
    do, job = asked._worker.asked[1]
    kept = [("keydiff", 5), ("keydiff", 3), ("tova", 5), ("tova", 3)]  # of all ten tokens, in both protocols
    assert (do, job["protocol"], job["tokens"], job["compressions"]) == ("evaluate", "after", 5, kept)
    (first, *_) = asked.predictions("text", 2, torch.ones(1, 10, dtype=torch.int64), 4)
    assert (first.method, first.window, first.nll, first.kl) == ("kvpress:keydiff", 2, pytest.approx(2.0), 0.25)


def test_the_command_line_knows_all_presses(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    assert tuple(importlib.import_module("kvpress_adapter").PRESSES) == cli.PRESSES


def test_the_environments_are_those_of_the_makefile(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for peer in ("kvpress", "llama"):
        folder = tmp_path / f".venv-{peer}"
        assert f"\n.venv-{peer}/ready:\n" in makefile
        folder.mkdir()
        assert command_of(peer) is None  # it is being made
        (folder / "ready").touch()
        assert command_of(peer) == [str(folder / "bin" / "python"), str(FOLDER / f"{peer}_adapter.py")]
