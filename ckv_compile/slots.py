"""How slots are stored: keys and values as they are, or as whole numbers of 8 bits times a step of their own.

Slots of 8 bits are keys and values [..., C, D] int8, and `degree` is then [..., C, 3] float32: the degree of a slot,
and the steps of its key and of its value. A step is a 127th of the largest number of a vector, rounded up to 16
significant bits: so every multiple of it up to 127 is exact in float32, and what was rounded once stays as it is when
it is rounded again.
"""

import torch
from torch import Tensor

from ckv_compile.reference import LARGEST

STORED = 3
"""Numbers of float32 that a slot of 8 bits has in `degree`."""
_LOW_BITS = 0xFF  # of a float32 of 24 significant bits, of which 16 stay


def to_int8(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Round vectors [..., D] of any floating dtype: the numbers [..., D] int8, and the steps [...] float32."""
    wide = vectors.float()
    step = (wide.abs().amax(dim=-1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    step = ((step.view(torch.int32) + _LOW_BITS) & ~_LOW_BITS).view(torch.float32)
    numbers = (wide / step[..., None]).round().nan_to_num(0.0)
    return numbers.to(torch.int8), step  # what is no number shows in the step


def from_int8(numbers: Tensor, step: Tensor) -> Tensor:
    """The vectors [..., D] float32 of numbers [..., D] int8 and steps [...] float32."""
    return numbers.float() * step[..., None]


def weights(keys: Tensor, degree: Tensor) -> Tensor:
    """The degrees [..., C] of slots, without the steps that slots of 8 bits have beside them."""
    return degree[..., 0] if keys.dtype == torch.int8 else degree


def read(keys: Tensor, values: Tensor, degree: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The keys and values [..., C, D] and degrees [..., C] of slots: views, or float32 of those of 8 bits."""
    if keys.dtype != torch.int8:
        return keys, values, degree
    return from_int8(keys, degree[..., 1]), from_int8(values, degree[..., 2]), degree[..., 0]


def write_(new: tuple[Tensor, Tensor, Tensor | float], keys: Tensor, values: Tensor, degree: Tensor) -> None:
    """Store keys and values [..., C, D] and degrees [..., C] in as many slots, rounded if those have 8 bits."""
    k, v, n = new
    if keys.dtype != torch.int8:
        keys.copy_(k)
        values.copy_(v)
        degree.copy_(n) if isinstance(n, Tensor) else degree.fill_(n)
        return
    for place, (vectors, slots) in enumerate(((k, keys), (v, values)), start=1):
        numbers, degree[..., place] = to_int8(vectors)
        slots.copy_(numbers)
    degree[..., 0] = n
