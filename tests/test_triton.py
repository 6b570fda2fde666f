"""The Triton kernels where there is no GPU: interpreted in a process of their own, and compiled for chips elsewhere."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from ckv_compile.kernels import aot

TESTS = Path(__file__).parent
# Of a chip's registers a thread, and of the shared memory that two programs (float32: one) leave each other.
MOST_REGISTERS = {"sm_80": 255, "sm_90": 255, "gfx942": 512}
# The compiler of triton 3.6 keeps a few numbers of some float32 kernels on the stack, at a step of ptxas's occupancy.
MOST_SPILLED = 0 if triton.__version__ >= "3.9" else 16
MOST_SHARED = {"sm_80": 99 * 1024, "sm_90": 99 * 1024, "gfx942": 64 * 1024}


def run_interpreted(*arguments: str) -> str:
    """Run pytest under Triton's interpreter, which is chosen when Triton is imported; return what it printed."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments],
        env=environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    return run.stdout


@pytest.mark.parametrize("module", ["attention", "compaction", "programs"])
def test_kernels_interpreted(module):
    printed = run_interpreted(f"tests/kernels/test_{module}.py")
    assert int(re.search(r"(\d+) passed", printed)[1]) > 3, printed
    assert "skipped" not in printed


@pytest.fixture(scope="module")
def reports():
    return list(aot.reports())


def test_every_specialisation_compiles_for_every_chip_without_spills(reports, capsys):
    by_target = {target: [report for report in reports if report.target == target] for target in aot.TARGETS}
    names = {report.name for report in reports}
    assert all({report.name for report in each} == names for each in by_target.values())
    assert {name.split("-")[0] for name in names} == {"decode", "combine", "extend", "match", "select", "move"}
    for report in reports:
        assert report.resources.spilled <= MOST_SPILLED, report
        assert report.resources.registers <= MOST_REGISTERS[report.target], report
        assert report.resources.shared <= MOST_SHARED[report.target], report
    with capsys.disabled():
        print()
        for target, each in by_target.items():
            worst = [max(each, key=lambda report, i=i: report.resources[i]) for i in (0, 2)]
            print(
                f"{target}: {len(each)} kernels, no spills; most registers {worst[0].resources.registers} "
                f"({worst[0].name}), most shared memory {worst[1].resources.shared} bytes ({worst[1].name})"
            )


def test_keys_and_values_are_loaded_128_bits_at_a_time(reports):
    for report in reports:
        if report.target == "gfx942" or report.name.startswith(("combine", "select")):
            continue
        wide = [load for load in report.loads if "v4.b32" in load or "v2.b64" in load or load.endswith("0x10")]
        assert wide, report
        if report.name.startswith(("decode", "match")):
            # All that is left is smaller than a slot: degrees, the new token, counters, the fill.
            copies = {load for load in report.loads if load.startswith("cp.async")}
            assert copies <= {"cp.async.cg.shared.global 0x10", "cp.async.ca.shared.global 0x4"}, report


def test_the_gpu_check_runs_line_by_line_on_the_cpu(tmp_path):
    file = tmp_path / "result.json"
    run = subprocess.run(
        [sys.executable, "demos/gpu_check.py", "--dry", "--minutes", "60", "--json", str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    sections = json.loads(file.read_text())["sections"]
    assert len(sections) == 9
    assert all(sections.values())
    checks = [row for rows in sections.values() for row in rows if "check" in row]
    assert len(checks) > 8
    assert all(row["ok"] for row in checks)
