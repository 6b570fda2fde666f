"""Ahead-of-time builds of the Triton kernels, which need no GPU: what ships, for which chips, at what cost.

`python -m ckv_compile.kernels.aot` compiles every specialisation and prints registers, shared memory and spills.
"""

import importlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
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


def reports() -> Iterator[Report]:
    """Compile every specialisation of every kernel for every target, on all processors."""
    builds = [(module, index) for module in _MODULES for index in range(len(importlib.import_module(module).builds()))]
    with ProcessPoolExecutor() as pool:
        for found in pool.map(_report, builds, chunksize=4):
            yield from found


def _report(build: tuple[str, int]) -> list[Report]:
    module, index = build  # not the build itself: a triton.jit function does not travel between processes
    chosen: Build = importlib.import_module(module).builds()[index]
    found = []
    for name, target in TARGETS.items():
        kernel = compile_build(chosen, target)
        found.append(Report(name, chosen.name, resources(kernel), tuple(_loads(kernel.asm.get("ptx", "")))))
    return found


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

    rows = [(report.target, report.name, *report.resources) for report in reports()]
    heads = ["target", "kernel", "registers", "spilled bytes", "shared bytes"]
    print(tabulate(sorted(rows), headers=heads, tablefmt="github"))


if __name__ == "__main__":
    main()
