"""docs/families.md agrees with itself and with the tests that it names."""

import re
from pathlib import Path

import conftest
import test_families

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
