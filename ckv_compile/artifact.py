"""Artifacts: a folder from which a compiled model runs again without the code of the model it was made of.

    config.json, generation_config.json    as transformers writes them
    ckv_config.json                        the options, the cache, the passes, and the table of weights
    model.safetensors                      one copy of every weight, in several files above a size
    prefill.pt2, decode-<rows>.pt2         the programs, which take the weights as inputs
    decode-<rows>.aot.pt2, decode_attention.so    on request: compiled for machines like the one that saved it
    (files of the tokenizer)
    manifest.json                          the size and SHA-256 of all of these, and where they can be used

`read` looks at the manifest first and at no file that it does not list, compares every size and then every digest, and
builds nothing until the tables and the programs agree with each other. Digests tell damage, not who made an artifact:
a compiled package is machine code, so load only what you trust.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import platform
import re
import secrets
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, get_args, get_origin

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from ckv_compile import program
from ckv_compile.cache import CacheShape, CacheState
from ckv_compile.config import CKVConfig
from ckv_compile.errors import ArtifactError, CompileError, ConfigError
from ckv_compile.kernels import cpu
from ckv_compile.ops import cached_attention, compact_, window_attention
from ckv_compile.passes.lower_to_triton import lower_to_triton
from ckv_compile.pipeline import CompileMode, PassResult, Program, Rewritten, check_mode, decode_graph, run_passes
from ckv_compile.program import StoredProgram, Weight
from ckv_compile.schedule import Plans

log = logging.getLogger("ckv_compile")

FORMAT = "ckv_compile artifact"
VERSION = 3
MANIFEST = "manifest.json"
_CONFIG, _MODEL_CONFIG, _GENERATION_CONFIG = "ckv_config.json", "config.json", "generation_config.json"
_PREFILL, _KERNEL = "prefill.pt2", "decode_attention.so"
_REQUIRED = (_CONFIG, _MODEL_CONFIG, _GENERATION_CONFIG, _PREFILL)


class Saved(NamedTuple):
    """All that a compiled model is made of."""

    rewritten: Rewritten
    config: CKVConfig
    model_config: PreTrainedConfig
    generation_config: GenerationConfig


class Loaded(NamedTuple):
    """What `read` makes of an artifact: the parts of a model, how it compiles, and its compiled steps by their rows."""

    saved: Saved
    mode: CompileMode
    programs: dict[int, Program]


class File(NamedTuple):
    """A file of an artifact."""

    bytes: int
    sha256: str


class Manifest(NamedTuple):
    """What `manifest.json` says."""

    version: int
    torch: str
    transformers: str
    device: str  # that the programs name, such as "cpu" or "cuda:0"
    machine: tuple[str, ...]  # the instructions that its compiled packages may use
    files: dict[str, File]  # by their names relative to the folder, with /


def save(
    saved: Saved,
    path: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    aot: Sequence[int] = (),
    max_shard_size: int | str = "5GB",
) -> None:
    """Write an artifact, whole or not at all.

    It is made in a hidden folder beside `path`, which takes its place at the end. One that was there already is moved
    aside for that instant: after a kill just then the next save brings it back first, and loading says where it is.

    Args:
        saved: the parts of the model.
        path: folder to write; it may hold an artifact, which is replaced, but nothing else.
        tokenizer: anything with a `save_pretrained(folder)`, whose files are added.
        aot: batch sizes whose decode step is compiled ahead of time, for this machine and those that have all its
            instructions.
        max_shard_size: bytes of a file of weights, at most, as a number or like "5GB".

    Raises:
        ArtifactError: if `path` holds something else, or the model has what the format cannot hold.
        ConfigError: for batch sizes that the model does not serve, or a size that is none.
        CompileError: if a step cannot be compiled here.
        ValueError: from transformers, for a generation config that it refuses to save.
        OSError: if a file cannot be written.
    """
    for rows in aot:
        if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= saved.config.max_batch_size:
            raise ConfigError(f"aot={list(aot)}: batch sizes are ints from 1 to {saved.config.max_batch_size}")
    shard_bytes = _bytes(max_shard_size)
    target = Path(path).resolve()
    aside = _aside(target)
    _check_replaceable(target)
    _check_replaceable(aside)
    if aside.is_dir() and not target.exists():
        aside.rename(target)  # a save was killed before the new one was in its place
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    scratch.mkdir()
    try:
        _write(saved, scratch, tokenizer, sorted(set(aot)), shard_bytes)
        for written in scratch.rglob("*"):
            _sync(written)
        _sync(scratch)
        for replaced in (target, aside):
            _check_replaceable(replaced)  # again: writing took minutes
        _discard(aside)  # that of a save that was killed when the new one was in its place
        if not target.exists() or not any(target.iterdir()):
            scratch.rename(target)  # in the place of an empty folder, too
        else:
            target.rename(aside)
            try:
                scratch.rename(target)
            except BaseException:
                aside.rename(target)
                raise
        _sync(target.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _discard(aside)


def is_artifact(path: str | os.PathLike[str]) -> bool:
    """Whether a folder says that it is an artifact, of any version; it may be damaged."""
    try:
        return bool(_json(Path(path, MANIFEST).read_bytes(), MANIFEST)["format"] == FORMAT)
    except (OSError, ArtifactError, KeyError, TypeError):
        return False


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of an artifact, and look at no other file.

    Raises:
        ArtifactError: if there is none, or it is damaged, of another version of the format, or names files that are not
            inside the folder.
    """
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        aside = _aside(folder.absolute())
        if aside.is_dir():
            raise ArtifactError(
                f"a save to {folder} was killed before it was done: the artifact that was there is {aside}; rename it, "
                "or save again"
            )
        raise ArtifactError(f"{folder} is no artifact, it has no {MANIFEST}: was it made by save_pretrained()?")
    data = _json((folder / MANIFEST).read_bytes(), MANIFEST)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ArtifactError(f"{folder / MANIFEST} is not that of a {FORMAT}")
    if data.get("version") != VERSION:
        raise ArtifactError(
            f"{folder} is of version {data.get('version')!r} of the format, and this package reads {VERSION}: load it "
            "with the package that saved it, or save it again with this one"
        )
    _check_fields(
        data, MANIFEST, format=str, version=int, torch=str, transformers=str, device=str, machine=list, files=dict
    )
    files = {}
    for name, entry in data["files"].items():
        _check_fields(entry, f"{MANIFEST}: {name}", bytes=int, sha256=str)
        _check_inside(folder, name)
        files[name] = File(entry["bytes"], entry["sha256"])
    if missing := [name for name in _REQUIRED if name not in files]:
        raise ArtifactError(f"{folder / MANIFEST} does not list {', '.join(missing)}")
    machine = tuple(str(instruction) for instruction in data["machine"])
    return Manifest(VERSION, data["torch"], data["transformers"], data["device"], machine, files)


def describe(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Verify the files and tables of an artifact, and say what it holds, on any machine and without building anything.

    `obstacle` says why it cannot be loaded here and `aot_obstacle` why its compiled packages cannot; None if they can.

    Raises:
        ArtifactError: if it is damaged.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    _check_files(folder, manifest)
    table = _Table.read(folder, manifest)
    _weights(folder, table, manifest, torch.device("cpu"))
    stored = {(entry.file, entry.tensor): entry for entry in table.weights}
    return {
        "format": f"{FORMAT} {manifest.version}",
        "torch": manifest.torch,
        "transformers": manifest.transformers,
        "device": manifest.device,
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "files": {name: file._asdict() for name, file in manifest.files.items()},
        "config": dataclasses.asdict(table.config),
        "cache": {**table.shape._asdict(), "dtype": _name(table.shape.dtype), "device": str(table.shape.device)},
        "vocabulary": table.vocabulary,
        "positions": table.positions,
        "passes": [result._asdict() for result in table.passes],
        "weights": len(stored),
        "parameters": sum(entry.numel for entry in stored.values() if entry.parameter),
        "decode": sorted(_steps(manifest, ".pt2")),
        "aot": sorted(_steps(manifest, ".aot.pt2")),
        "obstacle": _obstacle(manifest),
        "aot_obstacle": _aot_obstacle(manifest),
    }


def read(
    path: str | os.PathLike[str], *, device: str | torch.device | None = None, compile: str | None = None
) -> Loaded:
    """Read an artifact.

    Args:
        path: the folder.
        device: None takes the one that it was saved on; no other can be given.
        compile: "aot" uses the compiled packages, and compiles the decode step of other batch sizes at its first use;
            None does so if there are packages that this machine can run; or a mode of `transform`.

    Raises:
        ConfigError: for a mode that does not exist.
        ArtifactError: if the artifact is damaged, or cannot be used here.
        OSError: if a file cannot be read.
    """
    modes = (None, "aot", *get_args(CompileMode))
    if compile not in modes:
        raise ConfigError(f"compile={compile!r}: choose one of {', '.join(map(repr, modes))}")
    folder = Path(path)
    manifest = read_manifest(folder)
    if obstacle := _obstacle(manifest, device):
        raise ArtifactError(f"{folder} {obstacle}")
    packages, obstacle = _steps(manifest, ".aot.pt2"), _aot_obstacle(manifest)
    if compile == "aot" and (obstacle or not packages):
        raise ArtifactError(
            f'{folder}: compile="aot" needs compiled packages, but {obstacle or "it has none"}: save the model with '
            "aot=[1] on a machine like this one, or load it with another compile="
        )
    if compile is None and packages and obstacle:
        log.warning("the compiled packages of %s are not used: %s", folder, obstacle)
    _check_files(folder, manifest)
    table = _Table.read(folder, manifest)
    weights = _weights(folder, table, manifest, table.shape.device)
    prefill = _program(folder, _PREFILL, table, weights, rows=None)
    uses_packages = bool(packages) and not obstacle and compile in (None, "aot")
    steps = {}
    if compile != "eager":
        steps = {
            rows: _program(folder, name, table, weights, rows)
            for rows, name in _steps(manifest, ".pt2").items()
            if not uses_packages or rows not in packages
        }
    rewritten = Rewritten(prefill, table.shape, table.plans, table.vocabulary, table.positions, table.passes, steps)
    saved = Saved(rewritten, table.config, *_configs(folder))
    if uses_packages and _KERNEL in manifest.files:
        with _as_artifact_error(folder / _KERNEL):
            cpu.use_library(folder / _KERNEL)
    inputs = [weight.tensor for weight in weights]
    programs = {}
    if uses_packages:
        programs = {rows: _package(folder / name, inputs, table.shape.device) for rows, name in packages.items()}
    if read_manifest(folder) != manifest:
        raise ArtifactError(f"{folder} was replaced while it was loaded: load it again")
    mode: CompileMode = "inductor" if compile is None or compile == "aot" else check_mode(compile)
    return Loaded(saved, mode, programs)


class _Entry(NamedTuple):
    """A parameter or buffer of the graph, and where its numbers are: tied ones have the same place."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parameter: bool
    file: str
    tensor: str

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


class _Table(NamedTuple):
    """What `ckv_config.json` says."""

    config: CKVConfig
    shape: CacheShape
    plans: Plans
    vocabulary: int
    positions: int | None
    passes: tuple[PassResult, ...]
    weights: tuple[_Entry, ...]

    def to_json(self) -> str:
        cache = self.shape._asdict()
        del cache["device"]  # the manifest has it
        data = {
            "version": VERSION,
            "config": dataclasses.asdict(self.config),
            "cache": {**cache, "dtype": _name(self.shape.dtype)},
            "vocabulary": self.vocabulary,
            "positions": self.positions,
            "passes": [result._asdict() for result in self.passes],
            "weights": [{**entry._asdict(), "dtype": _name(entry.dtype)} for entry in self.weights],
        }
        return json.dumps(data, indent=1)

    @classmethod
    def read(cls, folder: Path, manifest: Manifest) -> "_Table":
        """Raises: ArtifactError, for anything that `to_json` would not write."""
        data = _json((folder / _CONFIG).read_bytes(), _CONFIG)
        whole = {"version": int, "config": dict, "cache": dict, "vocabulary": int, "passes": list, "weights": list}
        _check_fields(data, _CONFIG, **whole, positions=int | None)
        vocabulary, positions = data["vocabulary"], data["positions"]
        if data["version"] != VERSION:
            raise ArtifactError(f"{_CONFIG} is of version {data['version']}, and the manifest of {VERSION}")
        if vocabulary < 1 or (positions is not None and positions < 1):
            raise ArtifactError(
                f"{_CONFIG} has {vocabulary} token ids and {positions} positions: there is at least one"
            )
        _check_fields(data["config"], f"{_CONFIG}: config", **_types(CKVConfig))
        sizes = {name: int for name in CacheShape._fields if name not in ("dtype", "device", "light_layers", "int8")}
        _check_fields(data["cache"], f"{_CONFIG}: cache", **sizes, dtype=str, light_layers=list, int8=bool)
        for result in data["passes"]:
            _check_fields(result, f"{_CONFIG}: passes", name=str, matches=int, seconds=float)
        weight = {"name": str, "dtype": str, "shape": list, "parameter": bool, "file": str, "tensor": str}
        for entry in data["weights"]:
            _check_fields(entry, f"{_CONFIG}: weights", **weight)
        with _as_artifact_error(folder / _CONFIG):
            config = CKVConfig.from_options(data["config"])
            dtype, device = _dtype(data["cache"]["dtype"]), torch.device(manifest.device)
            cache = data["cache"] | {"dtype": dtype, "light_layers": tuple(data["cache"]["light_layers"])}
            shape = CacheShape(**cache, device=device)
            if config.light_layers != shape.light_layers:
                raise ValueError(f"light layers {shape.light_layers}, and the config has {config.light_layers}")
            if shape.int8 != (config.cache_dtype == "int8"):
                raise ValueError(f"int8={shape.int8}, and the config has cache_dtype={config.cache_dtype!r}")
            plans = config.plans(shape.clustered)
            _state_on_meta(shape, plans)  # raises for sizes that no tensor has
            weights = tuple(
                _Entry(**{**entry, "dtype": _dtype(entry["dtype"]), "shape": tuple(entry["shape"])})
                for entry in data["weights"]
            )
            for entry in weights:
                if not re.fullmatch(r"[\w-]+(\.[\w-]+)*", entry.name, re.ASCII):
                    raise ValueError(f"a weight named {entry.name!r}")
                torch.empty(entry.shape, dtype=entry.dtype, device="meta")  # likewise
            if len({entry.name for entry in weights}) < len(weights):
                raise ValueError("two weights of one name")
        passes = tuple(PassResult(**result) for result in data["passes"])
        return cls(config, shape, plans, vocabulary, positions, passes, weights)


def _write(saved: Saved, folder: Path, tokenizer: Any, aot: list[int], max_shard_size: int) -> None:
    """Write all files of an artifact, the manifest last."""
    rewritten, config = saved.rewritten, saved.config
    shape = rewritten.shape
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    saved.model_config.save_pretrained(folder)
    saved.generation_config.save_pretrained(folder)
    weights = program.weights_of(rewritten.graph)
    entries = _write_weights(weights, folder, max_shard_size)
    table = _Table(config, shape, rewritten.plans, rewritten.vocabulary, rewritten.positions, rewritten.passes, entries)
    (folder / _CONFIG).write_text(table.to_json())
    prefill = program.export(rewritten.graph, weights, CacheState.planned(shape, rewritten.plans, 2), steps=None)
    _write_program(prefill, folder / _PREFILL, table, rows=None)
    for rows in sorted({1, *aot}):
        state = CacheState.planned(shape, rewritten.plans, rows)
        step = program.export(decode_graph(rewritten, state), weights, state, steps=1)
        if rows in aot:  # first: it needs the examples of its inputs
            if shape.device.type == "cuda":
                run_passes(step.graph_module, [lower_to_triton], before=rewritten.passes)
            _write_package(step, folder / f"decode-{rows}.aot.pt2")
            if shape.device.type == "cuda":
                step = program.export(decode_graph(rewritten, state), weights, state, steps=1)
        _write_program(step, folder / f"decode-{rows}.pt2", table, rows)
    if aot and shape.device.type == "cpu" and (library := cpu.library()):
        shutil.copyfile(library, folder / _KERNEL)
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    manifest = Manifest(
        VERSION,
        torch.__version__,
        transformers.__version__,
        str(shape.device),
        _machine(shape.device) if aot else (),
        {name: File((folder / name).stat().st_size, _digest(folder / name)) for name in names},
    )
    data = {"format": FORMAT, **manifest._asdict(), "files": {n: f._asdict() for n, f in manifest.files.items()}}
    (folder / MANIFEST).write_text(json.dumps(data, indent=1))


def _write_weights(weights: Sequence[Weight], folder: Path, max_shard_size: int) -> tuple[_Entry, ...]:
    """Write each tensor once, and say where each weight is."""
    names: dict[tuple[object, ...], str] = {}
    for weight in weights:
        names.setdefault(program.identity(weight.tensor), weight.name)
    tensors = {w.name: w.tensor.detach() for w in weights if names[program.identity(w.tensor)] == w.name}
    shards = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for file, held in shards.filename_to_tensors.items():
        try:
            save_file({name: tensors[name].contiguous() for name in held}, folder / file, {"format": "pt"})
        except SafetensorError as error:  # a full disk
            raise OSError(f"{folder / file} could not be written: {error}") from error
        except (RuntimeError, KeyError) as error:
            raise ArtifactError(f"the weights cannot be stored as safetensors: {error}") from error
    files = shards.tensor_to_filename
    return tuple(
        _Entry(
            name,
            tensor.dtype,
            tuple(tensor.shape),
            isinstance(tensor, nn.Parameter),
            files[names[program.identity(tensor)]],
            names[program.identity(tensor)],
        )
        for name, tensor in weights
    )


def _write_program(exported: ExportedProgram, path: Path, table: _Table, rows: int | None) -> None:
    """Write a program, once it is known that it can be read."""
    data = program.to_bytes(exported)
    try:
        _check_program(program.read(data, path.name), path.name, table, rows)
    except ArtifactError as error:
        raise ArtifactError(f"this model cannot be saved, its graph is not what the format holds: {error}") from error
    path.write_bytes(data)


def _write_package(exported: ExportedProgram, path: Path) -> None:
    try:
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
    except Exception as error:
        raise CompileError(
            f"the decode step could not be compiled ahead of time ({type(error).__name__}: {error}); save_pretrained() "
            "without aot= needs no compiler"
        ) from error


def _obstacle(manifest: Manifest, device: str | torch.device | None = None) -> str | None:
    """Why an artifact cannot be loaded here and on this device, if it cannot."""
    if _minor(manifest.torch) != _minor(torch.__version__):
        return (
            f"was saved by torch {manifest.torch}, and this is {torch.__version__}: programs are read by the same "
            "minor version alone; save the model again"
        )
    try:
        saved_on = torch.device(manifest.device)
        wanted = saved_on if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        return f"cannot be loaded: no device is named {device or manifest.device!r} ({error})"
    if str(wanted) == "cuda":
        wanted = torch.device("cuda", 0)
    if wanted != saved_on or wanted.type not in ("cpu", "cuda"):
        return (
            f"was saved on {saved_on} and cannot be loaded on {wanted}: its programs name their device; save the model "
            "again from there (CUDA_VISIBLE_DEVICES chooses which GPU is cuda:0)"
        )
    if saved_on.type == "cuda" and saved_on.index >= torch.cuda.device_count():
        return f"was saved on {saved_on}, and there are {torch.cuda.device_count()} GPUs here"
    return None


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Compare the files of an artifact with its manifest: every size, and then every digest."""
    root = folder.resolve()
    for name, file in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ArtifactError(f"{path} is missing: copy the artifact again")
        if not path.resolve().is_relative_to(root):
            raise ArtifactError(f"{path} is a link out of the artifact: put the file itself there")
        if (size := path.stat().st_size) != file.bytes:
            raise ArtifactError(f"{path} has {size} bytes, and had {file.bytes} when it was saved: copy it again")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        digests = pool.map(_digest, [folder / name for name in manifest.files])
        for (name, file), digest in zip(manifest.files.items(), digests, strict=True):
            if digest != file.sha256:
                raise ArtifactError(f"{folder / name} is damaged: its SHA-256 is not that of the manifest")


def _state_on_meta(shape: CacheShape, plans: Plans) -> CacheState:
    """The dtypes and sizes of the state of one row."""
    return CacheState.planned(shape._replace(device=torch.device("meta")), plans, 1)


def _check_program(stored: StoredProgram, name: str, table: _Table, rows: int | None) -> None:
    """Compare what a program takes, and its calls of our operators, with the table."""
    state = _state_on_meta(table.shape, table.plans)
    expected = {
        program.weight_name(number): program.Input(entry.dtype, entry.shape)
        for number, entry in enumerate(table.weights)
    }
    expected["input_ids"] = program.Input(torch.int64, (rows, None if rows is None else 1))
    for field, tensor in state._asdict().items():
        expected[field] = program.Input(tensor.dtype, (rows, *tensor.shape[1:]))
    if list(stored.inputs) != list(expected):
        raise ArtifactError(f"{name} takes other inputs than the {len(table.weights)} weights, tokens and the cache")
    for field, found in stored.inputs.items():
        if found != expected[field]:
            raise ArtifactError(f"{name} takes {field} as {found}, where {_CONFIG} has {expected[field]}")
    shape, (main, light) = table.shape, (dataclasses.asdict(plan.schedule) for plan in table.plans)
    groups: tuple[tuple[Any, str, int, dict[str, Any]], ...] = (
        (cached_attention, "keys", shape.layers, main),
        (cached_attention, "light_keys", len(shape.light_layers), light),
        (window_attention, "window_keys", shape.window_layers, {}),
    )
    calls = [node for node in stored.graph.nodes if node.target in (cached_attention, window_attention)]
    for target, keys, layers, plan in groups:
        own = [_arguments(node) for node in calls if (node.target, _first_state(node)) == (target, keys)]
        numbers = [call.get("layer") for call in own]
        if numbers != list(range(layers)):
            raise ArtifactError(f"{name} attends in layers {numbers} of {keys}, where {_CONFIG} has {layers}")
        if any(not plan.items() <= call.items() for call in own):
            raise ArtifactError(f"{name} compacts {keys} by another plan than {_CONFIG}: {plan}")
    if len(calls) != shape.clustered + shape.window_layers:
        raise ArtifactError(f"{name} attends {len(calls)} times, and {_CONFIG} has other layers: {shape}")
    are_light = tuple(number for number, node in enumerate(calls) if _first_state(node) == "light_keys")
    if are_light != shape.light_layers:
        raise ArtifactError(f"{name} has the light layers {are_light}, and {_CONFIG} has {shape.light_layers}")
    closings = stored.graph.find_nodes(op="call_function", target=compact_)
    due = {"light_keys": light, "keys": main} if shape.light_layers else {"keys": main}
    ends = {_first_state(node): _arguments(node) for node in closings}
    if list(ends) != list(due) or any(not due[keys].items() <= ends[keys].items() for keys in due):
        raise ArtifactError(f"{name} does not end a step by the plans of {_CONFIG}: {due}")


def _first_state(node: Node) -> str:
    """The name of the first tensor of the state that one of our operators is called with: it tells the group."""
    return next((each.name for each in node.all_input_nodes if each.name in CacheState._fields), "")


def _arguments(node: Node) -> dict[str, Any]:
    """What one of our operators is called with, by the names in its schema; numbers alone."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema}  # which a stored graph leaves out
    given |= {**dict(zip(given, node.args, strict=False)), **node.kwargs}
    return {name: value for name, value in given.items() if isinstance(value, int | float)}


def _program(folder: Path, name: str, table: _Table, weights: Sequence[Weight], rows: int | None) -> GraphModule:
    stored = program.read((folder / name).read_bytes(), name)
    _check_program(stored, name, table, rows)
    with _as_artifact_error(folder / name):
        return program.bind(stored, weights)


def _weights(folder: Path, table: _Table, manifest: Manifest, device: torch.device) -> list[Weight]:
    """Load the weights, on the CPU as views of the files, and compare them with the table."""
    places: dict[str, set[str]] = {name: set() for name in manifest.files if name.endswith(".safetensors")}
    for entry in table.weights:
        if entry.file not in places:
            raise ArtifactError(f"{folder / MANIFEST} does not list {entry.file!r}, which holds {entry.name}")
        places[entry.file].add(entry.tensor)
    tensors: dict[tuple[str, str], Tensor] = {}
    for name, expected in places.items():
        with _as_artifact_error(folder / name), safe_open(folder / name, "pt", str(device)) as file:
            held = set(file.keys())
            if held != expected:
                raise ValueError(f"it does not hold the tensors that {_CONFIG} names: {sorted(held ^ expected)}")
            tensors |= {(name, tensor): file.get_tensor(tensor) for tensor in held}
    weights = []
    for entry in table.weights:
        tensor = tensors[entry.file, entry.tensor]
        if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            raise ArtifactError(
                f"{folder / entry.file} holds {entry.name} as {tuple(tensor.shape)} {tensor.dtype}, where {_CONFIG} "
                f"has {entry.shape} {entry.dtype}"
            )
        weights.append(Weight(entry.name, nn.Parameter(tensor, requires_grad=False) if entry.parameter else tensor))
    return weights


def _configs(folder: Path) -> tuple[PreTrainedConfig, GenerationConfig]:
    """The model's own configs; one of a model type that transformers does not know is a plain one."""
    with _as_artifact_error(folder / _MODEL_CONFIG):
        data = json.loads((folder / _MODEL_CONFIG).read_bytes())
        known = data.get("model_type") in CONFIG_MAPPING
        model_config = (CONFIG_MAPPING[data["model_type"]] if known else PreTrainedConfig).from_dict(data)
    with _as_artifact_error(folder / _GENERATION_CONFIG):
        return model_config, GenerationConfig.from_dict(json.loads((folder / _GENERATION_CONFIG).read_bytes()))


def _package(path: Path, weights: list[Tensor], device: torch.device) -> Program:
    """Load a compiled decode step, which takes the weights where they are."""
    index = device.index if device.type == "cuda" else -1
    with _as_artifact_error(path), torch.cuda.device(index):  # -1 is none, there and in the loader
        if broken := zipfile.ZipFile(path).testzip():
            raise ValueError(f"{broken} in it is damaged")
        # Single-threaded: its locks ask events of the device, which a CUDA graph that is recorded does not allow. One
        # thread at a time runs a model.
        package = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)

    def run(input_ids: Tensor, *state: Tensor) -> tuple[Tensor]:
        (logits,) = package.boxed_run([*weights, input_ids, *state])
        return (logits,)

    return run


def _steps(manifest: Manifest, suffix: str) -> dict[int, str]:
    """The files of decode steps, by their rows."""
    found = ((name, re.fullmatch(r"decode-([1-9][0-9]*)" + re.escape(suffix), name)) for name in manifest.files)
    return {int(match[1]): name for name, match in found if match}


def _machine(device: torch.device) -> tuple[str, ...]:
    """The instructions that code compiled here may use."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return (f"sm_{major}{minor}",)
    has = torch.cpu.get_capabilities()
    return platform.machine(), *sorted(name for name, value in has.items() if value is True)


def _aot_obstacle(manifest: Manifest) -> str | None:
    """Why this machine cannot run the compiled packages, if it cannot."""
    if not manifest.machine or _obstacle(manifest):
        return _obstacle(manifest)
    missing = sorted(set(manifest.machine) - set(_machine(torch.device(manifest.device))))
    return f"they use instructions that this machine does not have ({', '.join(missing)})" if missing else None


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.former")


def _check_replaceable(target: Path) -> None:
    """Refuse to replace what is no artifact, or holds anything that no save put there."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ArtifactError(f"{target} is a file: save to another folder, or move it first")
    held = {file.relative_to(target).as_posix() for file in target.rglob("*") if not file.is_dir()}
    if not held:
        return
    if not is_artifact(target):
        raise ArtifactError(f"{target} holds files and is no artifact: save to a new folder, or empty this one first")
    if others := held - {MANIFEST, *read_manifest(target).files}:
        raise ArtifactError(
            f"{target} also holds {', '.join(sorted(others))}, which a save would delete: move that first"
        )


def _discard(folder: Path) -> None:
    """Delete a folder under another name: half of it, after a kill, would be no artifact to the next save."""
    if folder.exists():
        gone = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _bytes(size: int | str) -> int:
    """The number that `max_shard_size` says."""
    number = size
    if isinstance(size, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT])B", size.strip(), re.ASCII | re.I)):
        number = int(float(match[1]) * 1000 ** (1 + "KMGT".index(match[2].upper())))
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(
            f'max_shard_size={size!r}: pass a number of bytes of at least 1, or one with KB, MB, GB or TB, like "5GB"'
        )
    return number


def _check_inside(folder: Path, name: str) -> None:
    parts = name.split("/")
    if PurePosixPath(name).is_absolute() or "\\" in name or "\0" in name or {"", ".", ".."} & set(parts):
        raise ArtifactError(f"{folder / MANIFEST} names {name!r}, which is no plain path inside the folder")


def _check_fields(data: Any, where: str, **types: Any) -> None:
    """Refuse an object of other fields, or with a value of another type; an int is also a float, a bool is no int."""
    if not isinstance(data, dict):
        raise ArtifactError(f"{where} is no object but a {type(data).__name__}")
    if data.keys() != types.keys():
        raise ArtifactError(f"{where} does not have the fields {', '.join(types)} but {', '.join(data)}")
    for name, kind in types.items():
        value = data[name]
        kinds = (kind, *get_args(kind))
        fits = isinstance(value, kind) or (float in kinds and isinstance(value, int))
        if not fits or (isinstance(value, bool) and bool not in kinds):
            raise ArtifactError(f"{where}: {name} is {value!r}, which is no {getattr(kind, '__name__', kind)}")


def _types(config: type) -> dict[str, Any]:
    written = {Sequence: list, Literal: str}
    return {field.name: written.get(get_origin(field.type), field.type) for field in dataclasses.fields(config)}


def _json(data: bytes, name: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{name} is damaged, it is no JSON: {error}") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk before anything else is done."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _as_artifact_error(path: Path) -> Iterator[None]:
    """What a library makes of a damaged file."""
    try:
        yield
    except ArtifactError:
        raise
    except Exception as error:
        raise ArtifactError(f"{path} is damaged ({type(error).__name__}: {error}): save the model again") from error
