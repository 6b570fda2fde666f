"""Processes that are asked over a pipe, and the adapters of peers as far as they go without their environments."""

import sys
from pathlib import Path

import pytest

from ckv_compile import peers
from ckv_compile.errors import PeerError
from ckv_compile.peers import Worker, command_of, kvpress

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
        next(kvpress([{"do": "predict"}]))


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
