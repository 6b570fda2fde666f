"""docs/families.md agrees with itself and the tests it names, docs/api.md with the sources, and the other pages run."""

import functools
import importlib
import logging
import re
from pathlib import Path

import conftest
import pytest
import test_families
import torch
import torch.nn.functional as F
import transformers
from conftest import tiny_model
from test_cli import tiny_tokenizer
from torch import nn
from transformers import CompileConfig

import ckv_compile

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "families.md").read_text()
TITLES = {
    "agree": "Served",
    "differ": "Served, but not as transformers does",
    "fail": "Neither served nor refused",
    "are refused": "Refused",
    "do not generate from text alone": "Not run by transformers",
    "do not build": "Not built",
}


def read(page: str) -> str:
    return (DOCS / page).read_text()


def rows(title: str) -> list[list[str]]:
    """The cells of the table of a section; none if there is no such section."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table[2:]]


def test_the_families_listed_as_tested_are_those_of_the_tests():
    listed = {test: {row[0] for row in rows("Served") if row[3] == test} for test in {row[3] for row in rows("Served")}}
    models = {config_class.model_type for config_class, _ in conftest.FAMILIES.values()}
    assert listed["tests/test_families.py"] == set(test_families.FAMILIES)
    assert listed["tests/test_model.py"] == models - set(test_families.FAMILIES)


def test_the_counts_are_those_of_the_tables():
    total, counts = re.search(r"\*\*(\d+) families\*\* \(\d+ classes\): ([^.]*)\.", PAGE).groups()
    found = {text: int(number) for number, text in re.findall(r"(\d+) ([a-z ]+)", " ".join(counts.split()))}
    assert found == {text: len(rows(title)) for text, title in TITLES.items()}
    assert int(total) == sum(found.values())
    assert re.search(r"agree with transformers +\| +(\d+)", PAGE)[1] == str(found["agree"])


def test_no_served_family_differs():
    assert not rows(TITLES["differ"])
    assert not rows(TITLES["fail"])


def run(page: str, names: dict[str, object], capsys) -> None:
    """Run the Python of a page in one namespace, each block against the output that follows it, seconds aside."""
    for language, text in re.findall(r"^```(python|text)\n(.*?)^```$", read(page), re.DOTALL | re.MULTILINE):
        if language == "python":
            capsys.readouterr()
            exec(compile(text, page, "exec"), names)
        else:
            seconds = r"\d+\.\d\d s$"
            printed = re.sub(seconds, "0 s", capsys.readouterr().out, flags=re.MULTILINE)
            assert printed == re.sub(seconds, "0 s", text, flags=re.MULTILINE)


def test_the_page_on_passes_does_what_it_says(capsys, caplog):
    caplog.set_level(logging.INFO, "ckv_compile")  # as the page does; this one is undone
    names: dict[str, object] = {"__name__": "page"}
    run("adding-a-pass.md", names, capsys)
    tests = [names[name] for name in names if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test()


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_the_guide_does_what_it_says(capsys, monkeypatch, tmp_path, prompt):
    """On a tiny model, in one folder, with nothing compiled."""
    torch._dynamo.reset()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ckv_compile, "transform", functools.partial(ckv_compile.transform, compile="eager"))
    monkeypatch.setattr(ckv_compile, "load", functools.partial(ckv_compile.load, compile="eager"))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, mode="eager"))
    monkeypatch.setattr(transformers, "CompileConfig", functools.partial(CompileConfig, mode="eager"))
    monkeypatch.setattr(CompileConfig, "_compile_all_devices", True)  # else on accelerators only
    ids, model = prompt(90), tiny_model(num_hidden_layers=2).double()
    names = {
        "model": model,
        "tokenizer": tiny_tokenizer(),
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    }
    run("guide.md", names, capsys)
    assert names["before"].get_seq_length() == 109
    assert names["cache"].get_seq_length() == 111  # two answers of 20 tokens, a turn of two, and 20 taken back
    assert torch.equal(names["output"], model.generate(**names["inputs"], max_new_tokens=50))  # nothing was merged


def test_the_reference_is_that_of_the_sources(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    api = importlib.import_module("api")
    assert read("api.md") == api.page(), "run `python docs/api.py --write docs/api.md`"
    assert all(f"### `{name}`" in read("api.md") or f"| `{name}` |" in read("api.md") for name in ckv_compile.__all__)
    sources = "".join(path.read_text() for path in Path(ckv_compile.__file__).parent.rglob("*.py"))
    assert set(re.findall(r"environ\S*\"(CKV_\w+)\"", sources)) == set(api.ENVIRONMENT)


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_lead_somewhere(page):
    for target, _, anchor in (link.partition("#") for link in re.findall(r"\]\(([^)\s:]+)\)", read(page))):
        path = DOCS / (target or page)
        assert path.is_file()
        text = path.read_text() if path.suffix == ".md" else ""
        headings = [
            re.sub(r"[^\w\- ]", "", line.lstrip("# ")).lower() for line in re.findall("^#.*", text, re.MULTILINE)
        ]
        assert not anchor or anchor in [heading.replace(" ", "-") for heading in headings]


def test_the_page_on_logs_shows_the_error_that_its_module_gets():
    shown = r"```python\n(class Attention.*?)```\n\n```text\n(.*?)\n```"
    code, printed = re.search(shown, read("logs-and-dumps.md"), re.DOTALL).groups()
    with pytest.raises(ckv_compile.PassError) as caught:
        exec(compile(code, "docs/logs-and-dumps.md", "exec"), {"ckv_compile": ckv_compile, "nn": nn, "F": F})
    assert printed == f"ckv_compile.errors.PassError: {caught.value}"
