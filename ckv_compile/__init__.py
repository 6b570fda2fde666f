"""KV-cache clustering for language models, as a compiler pass."""

from ckv_compile.backend import cache_for
from ckv_compile.cache import ClusteredCache
from ckv_compile.config import CKVConfig
from ckv_compile.errors import (
    ArtifactError,
    CKVError,
    CompileError,
    ConcurrentUseError,
    ConfigError,
    InputError,
    PassError,
    UnsupportedModelError,
)
from ckv_compile.model import CKVForCausalLM, load, transform

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "CKVConfig",
    "CKVError",
    "CKVForCausalLM",
    "ClusteredCache",
    "CompileError",
    "ConcurrentUseError",
    "ConfigError",
    "InputError",
    "PassError",
    "UnsupportedModelError",
    "cache_for",
    "load",
    "transform",
]
