"""What the Triton kernels have in common: how a specialisation is described, and what launchers ask of a device."""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Under the interpreter tl.dot multiplies bfloat16 as if it were uint16, so kernels widen its operands first."""

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
"""The dtypes of a cache that the kernels serve, as Triton writes them."""

HEAD_DIMS = (64, 80, 96, 128, 256)
"""The head sizes of common models, for which builds ship; other multiples of 8 are compiled at first use."""

_INTERPRETER_MULTIPROCESSORS = 4  # of tensors on the CPU, where every program costs time


_in_graph = ContextVar("_in_graph", default=False)


@contextlib.contextmanager
def in_graph() -> Iterator[None]:
    """Have launches become nodes of a graph that is being traced, as inside of a `triton_op`."""
    token = _in_graph.set(True)
    try:
        yield
    finally:
        _in_graph.reset(token)


def launch(kernel: Any, grid: tuple[int, ...]) -> Any:
    """What to call with the arguments of a kernel, a tensor first: runs it on the device of that one, or traces it."""
    if _in_graph.get():  # what runs the graph chooses the device
        return torch.library.wrap_triton(kernel)[grid]

    def run(first: Tensor, *rest: object, **options: object) -> None:
        with torch.cuda.device_of(first):
            kernel[grid](first, *rest, **options)

    return run


class Build(NamedTuple):
    """One specialisation of a kernel, as its launcher asks for it.

    Args:
        name: kernel, dtype and sizes, as in `decode-bf16-D128`.
        kernel: the `triton.jit` function.
        signature: type of every run-time argument: "*bf16", "*fp32", "i32", "fp32"...; pointers are 16-byte aligned.
        constants: value of every `tl.constexpr` argument.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int


def signature(kernel: Any, known: Mapping[str, str], pointer: str) -> dict[str, str]:
    """Type of every run-time argument: `known` by name, else `pointer` for a pointer and i32 for a number."""
    names = [param.name for param in kernel.params if not param.is_constexpr]
    return {name: known.get(name, pointer if name.endswith("_ptr") else "i32") for name in names}


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; a few where Triton's interpreter takes its place."""
    if device.type != "cuda":
        return _INTERPRETER_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
