"""The plugin for vLLM: one clustered state of constant size for every request, in place of pages of keys and values.

    vllm serve MODEL --attention-backend CUSTOM --additional-config '{"ckv": {"budget": 1024}}'

vLLM finds `register` by the entry point group `vllm.general_plugins`. Without the key "ckv" in `additional_config`
every model is served as if the plugin were not there. The value of the key has the fields of `CKVConfig`.
"""


def register() -> None:
    """Make the attention of this package known to vLLM, under the name CUSTOM and in place of that of its CPU engine.

    vLLM's CPU engine does not let an attention be chosen. What stands in its place here is vLLM's own, unless "ckv" is
    asked for; latent attention, which has backends apart, is then refused.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "ckv_compile.vllm.backend.ClusteredBackend")
    register_backend(AttentionBackendEnum.CPU_ATTN, "ckv_compile.vllm.backend.CpuBackend")
    register_backend(AttentionBackendEnum.CPU_MLA, "ckv_compile.vllm.latent.CpuBackend")
    register_backend(AttentionBackendEnum.AMX_MLA, "ckv_compile.vllm.latent.AmxBackend")
