"""KV-cache clustering for language models, as a compiler pass."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        PeerError,
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
    "PeerError",
    "UnsupportedModelError",
    "cache_for",
    "load",
    "transform",
]

_HOMES = {
    "CKVConfig": "config",
    "CKVForCausalLM": "model",
    "ClusteredCache": "cache",
    "cache_for": "backend",
    "load": "model",
    "transform": "model",
}


def __getattr__(name: str) -> Any:
    """Import a name at its first use: the command line should not wait for torch before it has something to do."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
    value = globals()[name] = getattr(home, name)
    return value
