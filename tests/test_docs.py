"""docs/families.md agrees with itself and with the tests that it names; the pages on passes run."""

import logging
import re
from pathlib import Path

import conftest
import pytest
import test_families
import torch.nn.functional as F
from torch import nn

import ckv_compile

PAGE = (Path(__file__).parent.parent / "docs" / "families.md").read_text()
TITLES = {
    "agree": "Served",
    "differ": "Served, but not as transformers does",
    "fail": "Neither served nor refused",
    "are refused": "Refused",
    "do not generate from text alone": "Not run by transformers",
    "do not build": "Not built",
}


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


def test_the_page_on_passes_does_what_it_says(capsys, caplog):
    """Run its Python in one namespace, each block against the output that follows it, and then its tests."""
    caplog.set_level(logging.INFO, "ckv_compile")  # as the page does; this one is undone
    page = (Path(__file__).parent.parent / "docs" / "adding-a-pass.md").read_text()
    names: dict[str, object] = {"__name__": "page"}
    for language, text in re.findall(r"^```(python|text)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        if language == "python":
            capsys.readouterr()
            exec(compile(text, "docs/adding-a-pass.md", "exec"), names)
        else:
            seconds = r"\d+\.\d\d s$"
            printed = re.sub(seconds, "0 s", capsys.readouterr().out, flags=re.MULTILINE)
            assert printed == re.sub(seconds, "0 s", text, flags=re.MULTILINE)
    tests = [names[name] for name in names if name.startswith("test_")]
    assert len(tests) == 3
    for test in tests:
        test()


def test_the_page_on_logs_shows_the_error_that_its_module_gets():
    page = (Path(__file__).parent.parent / "docs" / "logs-and-dumps.md").read_text()
    code, printed = re.search(r"```python\n(class Attention.*?)```\n\n```text\n(.*?)\n```", page, re.DOTALL).groups()
    with pytest.raises(ckv_compile.PassError) as caught:
        exec(compile(code, "docs/logs-and-dumps.md", "exec"), {"ckv_compile": ckv_compile, "nn": nn, "F": F})
    assert printed == f"ckv_compile.errors.PassError: {caught.value}"
