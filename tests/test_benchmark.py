"""The benchmark command in short form: every table, on a tiny model."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model

from ckv_compile.benchmark import tables, timing
from ckv_compile.benchmark.__main__ import main


@pytest.fixture
def tiny(monkeypatch, prompt):
    def load(source, dtype=torch.float32):
        return tiny_model().to(dtype), lambda text, return_tensors: SimpleNamespace(input_ids=prompt(400))

    monkeypatch.setattr(tables, "load_model", load)
    monkeypatch.setattr(tables, "FLAT_CONTEXTS", (50,))
    monkeypatch.setattr(tables, "QUALITY_TOKENS", 20)
    monkeypatch.setattr(tables, "QUALITY_BUDGETS", (0.5,))
    monkeypatch.setattr(timing, "BANDWIDTH_BYTES", 2**20)


def test_all_tables_are_printed_and_written(tiny, tmp_path, capsys):
    file = tmp_path / "result.json"
    main(
        [
            "--context",
            "300",
            "--budget",
            "110",
            "--tokens",
            "8",
            "--rounds",
            "2",
            "--dtypes",
            "float32",
            "--json",
            str(file),
        ]
    )
    result = json.loads(file.read_text())
    (run,) = result["runs"]
    caches = {row["method"]: row["cache_mb"] for row in run["rows"]}
    assert caches["ckv_compile, 110 slots"] == 3 * 3 * ((110 + 64) * (2 * 8 * 4 + 4) + (2 + 8 * 2) * 8 * 4) / 1e6
    assert len(caches) == (6 if importlib.util.find_spec("torchao") else 5)
    assert all(row["ms_per_token"] > 0 for row in run["rows"])
    full, half = result["quality"]
    assert full["kl"] < 1e-6 < half["kl"]
    assert full["agreement"] == 1.0
    printed = capsys.readouterr().out
    assert [row["context"] for row in result["memory"]] == [50]
    for heading in ("ms/token", "time per token against context", "peak memory of a prefill", "the next 20 tokens"):
        assert heading in printed


def test_a_text_that_is_too_short_is_named(tiny):
    with pytest.raises(SystemExit, match="the text has only 400 tokens"):
        main(["--context", "500", "--only", "quality"])
