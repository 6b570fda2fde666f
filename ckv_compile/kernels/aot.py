"""Ahead-of-time builds of the Triton kernels, which need no GPU: what ships, for which chips, at what cost.

`python -m ckv_compile.kernels.aot` compiles every specialisation and prints registers, shared memory and spills.
"""

import importlib
import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from ckv_compile.kernels.builds import Build

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),  # A100
    "sm_90": GPUTarget("cuda", 90, 32),  # H100, H200
    "gfx942": GPUTarget("hip", "gfx942", 64),  # MI300
}
_MODULES = ("ckv_compile.kernels.attention", "ckv_compile.kernels.compaction")


class Resources(NamedTuple):
    """What one program takes of a multiprocessor."""

    registers: int  # a thread
    spilled: int  # bytes a thread keeps in local memory
    shared: int  # bytes a program


class Report(NamedTuple):
    """A compiled specialisation: what it takes, and the global loads of its PTX (none on AMD)."""

    target: str
    name: str
    resources: Resources
    loads: tuple[str, ...]  # such as "ld.global.v4.b32" or "cp.async.cg.shared.global 0x10"


def compile_build(build: Build, target: GPUTarget) -> CompiledKernel:
    """Compile one specialisation for a chip that need not be here."""
    names = build.kernel.arg_names
    signature = {name: build.signature.get(name, "constexpr") for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if signature[name].startswith("*")
    }
    source = ASTSource(build.kernel, signature, dict(build.constants), aligned)
    return triton.compile(source, target=target, options={"num_warps": build.num_warps, "num_stages": build.num_stages})


def resources(kernel: CompiledKernel) -> Resources:
    """Read the resource report of a compiled kernel: from its cubin, or from the metadata of its AMD assembly."""
    shared = int(kernel.metadata.shared)
    if "cubin" not in kernel.asm:
        report = kernel.asm["amdgcn"]
        registers, spilled = (
            _first_number(rf"\.{name}:\s*(\d+)", report) for name in ("vgpr_count", "private_segment_fixed_size")
        )
        return Resources(registers, spilled, shared)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(kernel.asm["cubin"])
        tool = os.environ.get("CUOBJDUMP", str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"))
        report = subprocess.run(
            [tool, "--dump-resource-usage", str(path)], check=True, capture_output=True, text=True
        ).stdout
    spilled = _first_number(r"STACK:(\d+)", report) + _first_number(r"LOCAL:(\d+)", report)
    return Resources(_first_number(r"REG:(\d+)", report), spilled, shared)


def all_builds() -> dict[str, Build]:
    """Every specialisation of every kernel by its name."""
    builds = [build for module in _MODULES for build in importlib.import_module(module).builds()]
    return {build.name: build for build in builds}


def covering(builds: Iterable[Build], strength: int) -> list[Build]:
    """A few of the builds that stand for all: every `strength` choices that meet in one of all meet in one of them.

    A choice is the value of one constexpr of a kernel, its warps and stages, or the sizes of its argument types. Types
    of the same sizes, float16 and bfloat16, share everything but conversions, so each set of types need only occur.
    The builds are picked greedily, each the one with the most that is still missing.
    """
    found = {build.name: (build, _meetings(build, strength)) for build in builds}
    missing = set().union(*(meetings for _, meetings in found.values()))
    chosen = []
    while missing:
        build, meetings = max(found.values(), key=lambda each: len(each[1] & missing))
        chosen.append(build)
        missing -= meetings
    return chosen


def _meetings(build: Build, strength: int) -> set[tuple[object, ...]]:
    kernel, types = build.kernel.__name__, tuple(build.signature.values())
    sizes = tuple(kind.replace("bf16", "fp16") for kind in types)
    choices = [*build.constants.items(), ("sizes", sizes), ("warps, stages", (build.num_warps, build.num_stages))]
    return {(kernel, *together) for together in itertools.combinations(choices, strength)} | {(kernel, types)}


def report(build: Build, target: str) -> Report:
    """Compile one specialisation for one of `TARGETS`."""
    kernel = compile_build(build, TARGETS[target])
    return Report(target, build.name, resources(kernel), tuple(_loads(kernel.asm.get("ptx", ""))))


def _reports(name: str) -> list[Report]:
    build = all_builds()[name]  # by name, since a triton.jit function does not travel between processes
    return [report(build, target) for target in TARGETS]


def _loads(ptx: str) -> Iterator[str]:
    for kind, size in re.findall(r"(ld\.global[\w.]*|cp\.async\.c[ag][\w.]*) [^;]*?(?:, (0x[0-9a-f]+)[^;]*)?;", ptx):
        yield f"{kind} {size}".strip()


def _first_number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern!r} in the resource report:\n{text}")
    return int(found[1])


def main() -> None:
    """Print the table."""
    from tabulate import tabulate

    with ProcessPoolExecutor() as pool:
        reports = itertools.chain.from_iterable(pool.map(_reports, all_builds(), chunksize=4))
        rows = [(each.target, each.name, *each.resources) for each in reports]
    heads = ["target", "kernel", "registers", "spilled bytes", "shared bytes"]
    print(tabulate(sorted(rows), headers=heads, tablefmt="github"))


if __name__ == "__main__":
    main()
