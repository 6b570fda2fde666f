"""The CPU kernel of one decode step: attention over a clustered KV cache, in C++ through ctypes.

Inductor's own tool chain compiles `decode_attention.cpp` on first use: it finds the compiler, chooses the
instruction set of this machine, links the OpenMP runtime that torch uses, and keeps the library on disk.
Where that fails, or where the environment says CKV_CPU_KERNEL=0, `is_available` is False and the caller
keeps to the PyTorch form of the same attention. `library` names the compiled file, and a process that is
given it by `use_library` before the first use compiles nothing.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from ckv_compile.reference import LARGEST, LAST, RECENT
from ckv_compile.slots import STORED

_log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("decode_attention.cpp")
_SYMBOLS = {
    torch.float32: "ckv_decode_float32",
    torch.bfloat16: "ckv_decode_bfloat16",
    torch.float16: "ckv_decode_float16",
}
_INT8 = "_int8"  # behind the name of a function whose slots have 8 bits
_ARGTYPES = [ctypes.c_void_p] * 14 + [ctypes.c_int64] * 9 + [ctypes.c_float] * 4 + [ctypes.c_int]

# After Inductor's flags, of which some releases turn contraction off and others turn unsafe math on.
_FLAGS = ("-ffp-contract=fast", "-fno-unsafe-math-optimizations", "-fno-finite-math-only")

_build_lock = threading.Lock()
_given: list[ctypes.CDLL] = []  # at most one, until `_build` takes it


def is_available(dtype: torch.dtype) -> bool:
    """Whether `decode_attention` can serve this dtype here; the first call builds the kernel.

    A build that fails is reported by one warning per process, and not tried again. float16 is served where the
    machine converts it in hardware.
    """
    if dtype not in _SYMBOLS or os.environ.get("CKV_CPU_KERNEL") == "0":
        return False
    return (dtype, False) in _kernels()


def decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    degree: torch.Tensor | None,
    queries: torch.Tensor | None,
    last_queries: torch.Tensor | None,
    fill: torch.Tensor,
    active: torch.Tensor,
    position: torch.Tensor | None,
    layer: int,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Appends one token to every active row of one layer, takes in its queries, and attends over all used slots.

    The weight of a slot of degree n is softmax(q.k * scale + log n). The result of a row has the same bits
    whatever the rest of the batch is. Call it only where `is_available(q.dtype)`.

    Without degrees, queries and positions the cache is that of a layer with a sliding window of C tokens: a ring, where
    a token that comes after `fill` others is in slot fill % C, all weights are 1, and no row is ever full.

    Args:
        q: queries [B, H, 1, D]; D is a multiple of 8.
        k: new keys [B, Hkv, 1, D]; query head h uses KV head h // (H // Hkv).
        v: new values [B, Hkv, 1, D].
        keys: cached keys [B, L, Hkv, C, D], contiguous; slot `fill` is written (of a ring, slot fill % C). In the dtype
            of q, or int8 (see `slots`).
        values: cached values, likewise.
        degree: float32 [B, L, Hkv, C], contiguous; 0 marks an empty slot, which counts for nothing. With int8 keys and
            values [B, L, Hkv, C, 3]. None: a ring.
        queries: float32 [B, L, Hkv, 2, D], contiguous: running means of scale * q and of its square. None: a ring.
        last_queries: [B, L, Hkv, LAST, G, D] in the dtype of q, contiguous: scale * q of the last tokens; place
            `position` % LAST is written. None: a ring.
        fill: int64 [B]: used slots of each row, before this token; of a ring, all tokens before it.
        active: bool [B]: a row that is not active is left as it is, and its output is zero.
        position: int64 [B]: tokens of each row before this one. None: a ring.
        layer: the layer to serve.
        scale: factor of the scores.
        softcap: scores become softcap * tanh(score / softcap) before the degree enters; 0 leaves them.
        sinks: [H], in the dtype of q: a logit of each query head, not scaled, that takes part in the softmax and
            has no value.
        rows: int64 [B]: the row of the state that each row of the batch is of; keys, values, degree, queries,
            last_queries, fill, active and position may then have more rows. No two active ones are the same. None: row
            b is of row b.

    Returns:
        The attention output [B, H, 1, D], in the dtype of q.

    Raises:
        ValueError: if shapes, dtypes or memory layouts do not fit together.
        RuntimeError: if a row has no free slot; nothing has been written then.
        IndexError: if a row is not in the state.
    """
    states, layers, kv_heads, capacity, dim = cache_shape = keys.shape
    batch = states if rows is None else len(rows)
    dtype, new_shape, heads, int8 = q.dtype, (batch, kv_heads, 1, dim), q.shape[1], keys.dtype == torch.int8
    degree_shape = (states, layers, kv_heads, capacity, *([STORED] if int8 else []))
    if not (
        values.shape == cache_shape
        and (degree is None) == (queries is None) == (last_queries is None) == (position is None)
        and (not int8 if degree is None else degree.shape == degree_shape)
        and (queries is None or queries.shape == (states, layers, kv_heads, 2, dim))
        and (last_queries is None or last_queries.shape == (states, layers, kv_heads, LAST, heads // kv_heads, dim))
        and (position is None or position.shape == (states,))
        and (sinks is None or sinks.shape == (heads,))
        and q.shape == (batch, heads, 1, dim)
        and k.shape == new_shape
        and v.shape == new_shape
        and fill.shape == active.shape == (states,)
        and heads % kv_heads == dim % 8 == 0
        and (rows is None or (rows.shape, rows.dtype) == ((batch,), torch.int64))
        and 0 <= layer < layers
    ):
        names = "q, k, v, keys, values, degree, queries, last_queries, fill, active, position, sinks, rows"
        tensors = (q, k, v, keys, values, degree, queries, last_queries, fill, active, position, sinks, rows)
        shapes = [None if tensor is None else tuple(tensor.shape) for tensor in tensors]
        raise ValueError(f"cannot serve layer {layer} with {names} of {shapes}")
    alike = {"q": q, "k": k, "v": v, "keys": keys, "values": values, "last_queries": last_queries, "sinks": sinks}
    if int8 and values.dtype == torch.int8:
        del alike["keys"], alike["values"]
    dtypes = {name: tensor.dtype for name, tensor in alike.items() if tensor is not None}
    if set(dtypes.values()) != {dtype}:
        found = ", ".join(f"{kind} {name}" for name, kind in dtypes.items())
        raise ValueError(f"{', '.join(dtypes)} must share one dtype, got {found}")
    clusters = [tensor for tensor in (degree, queries) if tensor is not None]
    counters = [tensor for tensor in (fill, position) if tensor is not None]
    kinds = [tensor.dtype for tensor in (*clusters, *counters, active)]
    if kinds != [torch.float32] * len(clusters) + [torch.int64] * len(counters) + [torch.bool]:
        raise ValueError(f"degree, queries must be float32, fill, position int64 and active bool, got {kinds}")
    written = [keys, values, *clusters, *(() if last_queries is None else (last_queries,))]
    if not all(tensor.is_contiguous() for tensor in written):
        raise ValueError(
            "keys, values, degree, queries, last_queries must be contiguous: the kernel writes to them in place"
        )

    q, k, v, fill, active = (tensor.contiguous() for tensor in (q, k, v, fill, active))
    position, sinks, rows = (None if tensor is None else tensor.contiguous() for tensor in (position, sinks, rows))
    out = torch.empty_like(q)
    status = _kernels()[dtype, int8](
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        None if degree is None else degree.data_ptr(),
        None if queries is None else queries.data_ptr(),
        None if last_queries is None else last_queries.data_ptr(),
        fill.data_ptr(),
        active.data_ptr(),
        None if position is None else position.data_ptr(),
        None if sinks is None else sinks.data_ptr(),
        None if rows is None else rows.data_ptr(),
        out.data_ptr(),
        batch,
        states,
        layers,
        layer,
        kv_heads,
        heads // kv_heads,
        capacity,
        dim,
        LAST,
        scale,
        softcap,
        1 / RECENT,
        LARGEST,
        torch.get_num_threads(),
    )
    if status > 0:
        row = status - 1 if rows is None else int(rows[status - 1])
        raise RuntimeError(f"row {row} has no free slot: fill is {int(fill[row])}, capacity is {capacity}")
    if status == -2:
        raise IndexError(f"rows={rows} must lie between 0 and {states - 1}")
    if status < 0:
        raise MemoryError("decode_attention: no memory for its scratch space")
    return out


def library() -> Path | None:
    """The file of the compiled kernel, which the first call builds; None where it cannot be built."""
    with _build_lock:
        built = _build()
    return None if built is None else Path(built._name)


def use_library(path: Path) -> None:
    """Load the kernel from a file that `library` named, on a machine of the same instructions, in place of a build.

    A process that has the kernel already keeps it.

    Raises:
        OSError: if it is no library that can be loaded here.
    """
    given = ctypes.CDLL(str(path))
    if not hasattr(given, _SYMBOLS[torch.float32]):
        raise OSError(f"{path} is a library, but not of this kernel")
    with _build_lock:
        if not _build.cache_info().currsize:
            _given[:] = [given]


@cache
def _kernels() -> dict[tuple[torch.dtype, bool], Callable[..., int]]:
    """The compiled functions by dtype and whether slots have 8 bits; those that this machine lacks are missing."""
    with _build_lock:  # for threads that arrive before the first result is cached
        built = _build()
    if built is None:
        return {}
    functions = {
        (dtype, int8): getattr(built, symbol + _INT8 * int8)
        for dtype, symbol in _SYMBOLS.items()
        for int8 in (False, True)
        if hasattr(built, symbol)
    }
    for function in functions.values():
        function.argtypes, function.restype = _ARGTYPES, ctypes.c_int64
    return functions


@cache
def _build() -> ctypes.CDLL | None:
    if _given:
        return _given.pop()
    try:
        from torch._inductor.codecache import CppCodeCache

        built: ctypes.CDLL = CppCodeCache.load(_SOURCE.read_text(), extra_flags=_FLAGS)
    except Exception as error:  # no compiler, a failed build, another torch: all end in the fallback
        _log.warning("no CPU decode kernel, using the PyTorch form instead: %s", error)
        return None
    return built
