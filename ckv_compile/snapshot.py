"""A cache as a file: one safetensors file that another process can load and go on from."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ckv_compile.cache import CacheShape, CacheState, ClusteredCache
from ckv_compile.errors import InputError
from ckv_compile.schedule import Schedule

FORMAT = "ckv_compile cache 3"
_SLOTS = ("keys", "values", "degree")


def save(cache: ClusteredCache, path: str | os.PathLike[str], model: str) -> None:
    """Write a cache, with its used slots alone, and the fingerprint of the model it belongs to.

    The file appears whole or not at all.

    Raises:
        InputError: if a step of the cache was interrupted half-way.
        OSError: if the file cannot be written.
    """
    cache.check_whole()
    used = int(cache.state.fill.max())
    tensors: dict[str, Tensor] = {
        name: (tensor[:, :, :, :used] if name in _SLOTS else tensor).contiguous()
        for name, tensor in cache.state._asdict().items()
    }
    metadata = {
        "format": FORMAT,
        "model": model,
        "columns": str(cache.columns),
        "capacity": str(cache.capacity),
        "schedule": json.dumps(dataclasses.asdict(cache.schedule)),
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


def load(
    path: str | os.PathLike[str], model: str, shape: CacheShape, schedule: Schedule, capacity: int, most_rows: int
) -> ClusteredCache:
    """Read what `save` wrote for a model of this fingerprint, cache shape, schedule, capacity and number of rows.

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
    saved: dict[str, Any] = json.loads(metadata["schedule"]) | {"capacity": int(metadata["capacity"])}
    wanted = dataclasses.asdict(schedule) | {"capacity": capacity}
    if saved != wanted:
        different = ", ".join(
            f"{name}={saved.get(name)} (here {wanted[name]})" for name in wanted if saved.get(name) != wanted[name]
        )
        raise InputError(f"{path} was saved with {different}: transform() the model with the same options")
    fill = tensors.get("fill", torch.empty(0))
    rows, (least, used) = fill.numel(), (int(fill.min()), int(fill.max())) if fill.numel() else (0, 0)
    if not 1 <= rows <= most_rows:
        raise InputError(f"{path} holds {rows} rows; this model was transformed for 1 to {most_rows}")
    expected = CacheState.allocate(shape._replace(device=torch.device("meta")), capacity, rows)
    for name, like in expected._asdict().items():
        like = like[:, :, :, :used] if name in _SLOTS else like
        found = tensors.get(name)
        if found is None or found.shape != like.shape or found.dtype != like.dtype or not 0 <= least <= used < capacity:
            held = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
            raise InputError(
                f"{path} holds {held} as {name}, where {tuple(like.shape)} {like.dtype} is due, with less than "
                f"{capacity} slots in use: the file is damaged"
            )
    with torch.inference_mode(False):
        state = CacheState.allocate(shape, capacity, rows)
        for name, tensor in state._asdict().items():
            (tensor[:, :, :, :used] if name in _SLOTS else tensor).copy_(tensors[name])
    return ClusteredCache(shape, schedule, state, int(metadata["columns"]))
