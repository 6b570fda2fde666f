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

from ckv_compile.reference import LARGEST

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Under the interpreter tl.dot multiplies bfloat16 as if it were uint16, so kernels widen its operands first."""

POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
"""The dtypes of a cache that the kernels serve, as Triton writes them."""

HEAD_DIMS = (64, 80, 96, 128, 256)
"""The head sizes of common models, for which builds ship; other multiples of 8 are compiled at first use."""

INT8 = "*i8"
"""Slots of 8 bits, as Triton writes them."""

_LARGEST, _TINY = tl.constexpr(float(LARGEST)), tl.constexpr(torch.finfo(torch.float32).tiny)
_TO_WHOLE = tl.constexpr(1.5 * 2**23)  # beside which a float32 has no fraction

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


@triton.jit
def largest_of(vectors, AXIS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest numbers of vectors, NaN of one that holds a NaN, which a maximum would pass over."""
    broken = tl.sum((vectors != vectors).to(tl.int32), axis=AXIS) > 0
    return tl.where(broken, float("nan"), tl.max(tl.abs(vectors), axis=AXIS))


@triton.jit
def step_of(largest):  # type: ignore[no-untyped-def]
    """The steps of vectors that are rounded to 8 bits, by their largest numbers: see `slots.to_int8`."""
    step = tl.div_rn(largest, tl.zeros_like(largest) + _LARGEST)
    step = tl.where(step < _TINY, _TINY, step)
    return ((step.to(tl.int32, bitcast=True) + 0xFF) & -0x100).to(tl.float32, bitcast=True)


@triton.jit
def whole_numbers(vectors, step):  # type: ignore[no-untyped-def]
    """Vectors in their steps, rounded to whole numbers, the even ones of two that are as near: see `slots.to_int8`."""
    numbers = tl.div_rn(vectors, tl.zeros_like(vectors) + step)
    return tl.where(numbers == numbers, (numbers + _TO_WHOLE) - _TO_WHOLE, 0.0)


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
