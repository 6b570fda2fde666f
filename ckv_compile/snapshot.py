"""A cache as a file: one safetensors file that another process can load and go on from."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ckv_compile.cache import CacheShape, CacheState, ClusteredCache
from ckv_compile.errors import InputError
from ckv_compile.schedule import Plans

FORMAT = "ckv_compile cache 4"
_COUNTED_BY = {f"{group}{name}": f"{group}fill" for group in ("", "light_") for name in ("keys", "values", "degree")}
"""What holds slots, and what counts them: those behind the longest row's are left out."""


def save(cache: ClusteredCache, path: str | os.PathLike[str], model: str) -> None:
    """Write a cache, with its used slots alone, and the fingerprint of the model it belongs to.

    The file appears whole or not at all.

    Raises:
        InputError: if a step of the cache was interrupted half-way.
        OSError: if the file cannot be written.
    """
    cache.check_whole()
    state = cache.state._asdict()
    used = {count: int(state[count].max()) for count in _COUNTED_BY.values()}
    tensors = {name: _used(name, tensor, used).contiguous() for name, tensor in state.items()}
    metadata = {
        "format": FORMAT,
        "model": model,
        "columns": str(cache.columns),
        "plans": json.dumps(_written(cache.shape, cache.plans)),
    }
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        save_file(tensors, scratch, metadata)
        scratch.replace(target)
    except SafetensorError as error:  # what it makes of a missing folder, or a full disk
        raise OSError(f"{target} could not be written: {error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], model: str, shape: CacheShape, plans: Plans, most_rows: int) -> ClusteredCache:
    """Read what `save` wrote for a model of this fingerprint, cache shape, plans and number of rows.

    Raises:
        InputError: if the file is none of this format, or of another model or configuration.
        OSError: if there is no file to read.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            names = set(file.keys())
            tensors = {name: file.get_tensor(name) for name in CacheState._fields if name in names}
    except SafetensorError as error:
        raise InputError(f"{path} is no whole safetensors file: {error}") from error
    if metadata.get("format") != FORMAT:
        raise InputError(f"{path} holds {metadata.get('format')!r}, not {FORMAT!r}: was it saved by save_cache()?")
    if metadata["model"] != model:
        raise InputError(f"{path} belongs to a model of other weights: load it with the model that it was saved by")
    saved, wanted = json.loads(metadata["plans"]), _written(shape, plans)
    if saved != wanted:
        different = ", ".join(
            f"{name}={saved.get(name)} (here {wanted[name]})" for name in wanted if saved.get(name) != wanted[name]
        )
        raise InputError(f"{path} was saved with {different}: transform() the model with the same options")
    counts = {name: tensors.get(name, torch.empty(0)) for name in ("fill", "light_fill")}
    rows = counts["fill"].numel()
    if not 1 <= rows <= most_rows:
        raise InputError(f"{path} holds {rows} rows; this model was transformed for 1 to {most_rows}")
    used = {}
    for (name, count), plan in zip(counts.items(), plans, strict=True):
        used[name] = int(count.max()) if count.numel() else 0
        if count.numel() and not 0 <= int(count.min()) <= used[name] < max(1, plan.capacity):
            raise InputError(
                f"{path} holds {name} {count.tolist()}, where less than {plan.capacity} slots are in use: the file is "
                "damaged"
            )
    expected = CacheState.planned(shape._replace(device=torch.device("meta")), plans, rows)
    for name, like in expected._asdict().items():
        like, found = _used(name, like, used), tensors.get(name)
        if found is None or found.shape != like.shape or found.dtype != like.dtype:
            held = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
            raise InputError(
                f"{path} holds {held} as {name}, where {tuple(like.shape)} {like.dtype} is due: the file is damaged"
            )
    with torch.inference_mode(False):
        state = CacheState.planned(shape, plans, rows)
        for name, tensor in state._asdict().items():
            _used(name, tensor, used).copy_(tensors[name])
    return ClusteredCache(shape, plans, state, int(metadata["columns"]))


def _used(name: str, tensor: Tensor, used: Mapping[str, int]) -> Tensor:
    """A tensor of the state, or its used slots if it holds slots."""
    return tensor[:, :, :, : used[_COUNTED_BY[name]]] if name in _COUNTED_BY else tensor


def _written(shape: CacheShape, plans: Plans) -> dict[str, Any]:
    """Plans as they stand in a file, the layers that have the one for light ones, and what slots are made of."""
    return {"light_layers": list(shape.light_layers), "cache_dtype": "int8" if shape.int8 else "auto"} | {
        f"{group}{name}": value
        for group, plan in (("", plans.main), ("light_", plans.light))
        for name, value in (dataclasses.asdict(plan.schedule) | {"capacity": plan.capacity}).items()
    }
