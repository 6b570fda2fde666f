"""The Triton kernels where there is no GPU: interpreted in a process of their own, and compiled for chips elsewhere."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from ckv_compile.passes.lower_to_triton import lower_to_triton
from conftest import tiny_model
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import aot_module_simplified
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
from torch._inductor.virtualized import V

from ckv_compile.cache import CacheState
from ckv_compile.capture import reexport
from ckv_compile.kernels import aot, attention, compaction
from ckv_compile.kernels.builds import Build
from ckv_compile.model import rewrite_model

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
    assert len(sections) == 12
    assert all(sections.values())
    checks = [row for rows in sections.values() for row in rows if "check" in row]
    assert len(checks) > 8
    assert all(row["ok"] for row in checks)


ALL = aot.all_builds()
SOME, MORE = aot.covering(ALL.values(), strength=1), aot.covering(ALL.values(), strength=2)
COVERING = {target: MORE if target == "sm_90" else SOME for target in aot.TARGETS}
BUILDS = dict.fromkeys(aot.TARGETS, ALL.values()) if os.environ.get("CKV_ALL_BUILDS") == "1" else COVERING


@pytest.mark.parametrize(
    ("target", "build"),
    [pytest.param(target, build, id=f"{target}-{build.name}") for target in aot.TARGETS for build in BUILDS[target]],
)
def test_a_build_has_no_spills_and_loads_keys_and_values_128_bits_at_a_time(target, build):
    report = aot.report(build, target)
    assert report.resources.spilled <= MOST_SPILLED
    assert report.resources.registers <= MOST_REGISTERS[target]
    assert report.resources.shared <= MOST_SHARED[target]
    if target == "gfx942" or build.name.startswith(("combine", "select")):
        return
    assert any("v4.b32" in load or "v2.b64" in load or load.endswith("0x10") for load in report.loads), report.loads
    if build.name.startswith(("decode", "match")):
        # All that is left is smaller than a slot: degrees, the new token, counters, the fill.
        copies = {load for load in report.loads if load.startswith("cp.async")}
        small = {"0x4", "0x8"} if "int8" in build.name else {"0x4"}  # steps too
        assert copies <= {"cp.async.cg.shared.global 0x10", *(f"cp.async.ca.shared.global {size}" for size in small)}


@pytest.mark.parametrize(("few", "together"), [(SOME, 1), (MORE, 2)], ids=["one", "two"])
def test_the_builds_of_every_run_stand_for_all(few, together):
    """Every value of a constexpr, and for sm_90 every two, and all types of arguments; sizes of dtypes among them."""

    def met(builds):
        found = {(build.kernel.__name__, *build.signature.values()) for build in builds}
        for build in builds:
            wide = "*fp32" in [build.signature.get("keys_ptr"), build.signature.get("q_ptr")]
            choices = [*build.constants.items(), ("wide", wide)]
            found |= {(build.kernel.__name__, *some) for some in itertools.combinations(choices, together)}
        return found

    assert {name.split("-")[0] for name in ALL} == {
        "decode",
        "combine",
        "extend",
        "attend",
        "exchange",
        "match",
        "select",
        "move",
    }
    assert len(ALL) == sum(len(module.builds()) for module in (attention, compaction))
    assert len(few) < len(ALL)
    assert met(few) == met(ALL.values())


def test_the_page_counts_the_builds():
    page = " ".join((TESTS.parent / "docs" / "gpu.md").read_text().split())
    assert f"all {len(ALL)} specialisations" in page
    assert f"compiles {len(MORE)} of them for sm_90" in page
    assert f"and {len(SOME)} for sm_80 and gfx942" in page


class _ChipElsewhere:
    """A driver that answers for a chip which is not here."""

    def get_current_target(self):
        return aot.TARGETS["sm_90"]

    def is_active(self):
        return True


@pytest.mark.parametrize(("family", "exact", "light"), [("llama", 0.5, ()), ("gpt-oss", 0.0, ()), ("llama", 0.0, (1,))])
def test_a_lowered_step_holds_its_kernels_and_copies_no_cache(family, exact, light, monkeypatch):
    """What Inductor is given for a CUDA package: launches that it can compile, which write to the state in place."""
    monkeypatch.setattr(triton.runtime.driver, "_active", _ChipElsewhere())
    model = tiny_model(family, head_dim=64).to(torch.bfloat16)
    options = {"budget": 160, "interval": 32, "n_recent": 8, "n_sink": 2, "exact": exact, "chunk_size": 16}
    options |= {"light_layers": light, "light_share": 0.5}
    rewritten, _ = rewrite_model(model, None, options)
    state = CacheState.planned(rewritten.shape, rewritten.plans, 1)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    graph = reexport(rewritten.graph, ids, state)
    compactions = 2 if light else 1
    assert lower_to_triton(graph) == 3 + compactions  # of layers, and of groups
    graph.recompile()
    graphs = []
    with torch.no_grad():
        aot_module_simplified(
            graph, (ids, *state), lambda graph, _: graphs.append(graph) or graph, keep_inference_input_mutations=True
        )
    (lowered,) = graphs
    assert not [node for node in lowered.graph.nodes if "ckv" in str(node.target)]
    inputs = [node.meta["val"] for node in lowered.graph.find_nodes(op="placeholder")]
    with V.set_fake_mode(detect_fake_mode(inputs)):
        reinplace_inplaceable_ops(SimpleNamespace(incremental_update=lambda: None), lowered.graph)
    launches = lowered.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional)
    # A compaction has three, and two more where slots are exact.
    assert len(launches) == 3 + compactions * (5 if exact else 3)
    for node in launches:
        written = {
            "keys_ptr",
            "values_ptr",
            "degree_ptr",
            "queries_ptr",
            "last_queries_ptr",
            "fill_ptr",
            "position_ptr",
        }
        assert not written & set(node.kwargs["tensors_to_clone"]), node
        build = build_of(node)
        for target in ("sm_80", "sm_90"):
            assert aot.report(build, target).resources.shared <= MOST_SHARED[target]
    for node in lowered.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        assert node.args[0] is node.args[1]  # of what was written in place: Inductor drops it
    clones = lowered.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert all(node.meta["val"].numel() < state.keys[0, 0].numel() for node in clones)


def build_of(launch):
    """The specialisation that a launch in a graph asks for."""
    kernel = kernel_side_table.get_kernel(launch.kwargs["kernel_idx"])
    given = launch.kwargs["kwargs"] | kernel_side_table.get_constant_args(launch.kwargs["constant_args_idx"])
    (choice,) = kernel.configs  # its warps and stages
    kernel = kernel.fn
    constants = {param.name: given[param.name] for param in kernel.params if param.is_constexpr}
    types = {float: "fp32", int: "i32"}
    names = {
        torch.bfloat16: "*bf16",
        torch.float32: "*fp32",
        torch.int64: "*i64",
        torch.int32: "*i32",
        torch.bool: "*i1",
    }
    signature = {
        param.name: types.get(type(given[param.name])) or names[given[param.name].meta["val"].dtype]
        for param in kernel.params
        if not param.is_constexpr
    }
    return Build("lowered", kernel, signature, constants, choice.num_warps, choice.num_stages)
