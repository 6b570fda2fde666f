"""vLLM's backends of latent attention (MLA) on the CPU, which refuse to serve where "ckv" is asked for.

A model with latent attention never comes to the backends of this package, so it would be served without clustering.
"""

from typing import Any

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from ckv_compile.errors import UnsupportedModelError
from ckv_compile.vllm.settings import KEY, config_of


def refuse(engine: VllmConfig) -> None:
    """Refuse a model that asks for a clustered cache.

    Raises:
        UnsupportedModelError: with what to change.
    """
    if config_of(engine) is not None:
        raise UnsupportedModelError(
            f"{engine.model_config.architecture} has latent attention, which keeps no keys and values of heads under "
            f"vLLM: serve another model, or take {KEY!r} out of additional_config"
        )


class CpuBackend(CPUMLABackend):
    """vLLM's own, which asks first."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """The attention of a layer of the model that is being built."""
        refuse(get_current_vllm_config())
        return CPUMLABackend.get_impl_cls()


class AmxBackend(AMXMLABackend):
    """vLLM's own, which asks first."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """The attention of a layer of the model that is being built."""
        refuse(get_current_vllm_config())
        return AMXMLABackend.get_impl_cls()
