"""Attention over clustered states as backends of vLLM."""

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout, KVCacheSpec

from ckv_compile.cache import CacheShape, CacheState
from ckv_compile.config import CKVConfig
from ckv_compile.errors import ConfigError, UnsupportedModelError
from ckv_compile.ops import cached_attention, compact_
from ckv_compile.vllm.settings import KEY, Layer, check, config_of
from ckv_compile.vllm.state import StateSpec, carve

log = logging.getLogger("ckv_compile")


class Prompt(NamedTuple):
    """A part of a prompt that a step takes: tokens `start` to `stop` of the step, for a row of the state."""

    start: int
    stop: int
    row: int


@dataclass
class StateMetadata(AttentionMetadata):
    """What a step does, the same for all layers.

    Requests of one token come first in a step, then those of several.
    """

    state: CacheState
    plan: tuple[int | float, ...]
    layers: dict[str, int]  # the place of a layer in the state, by its name
    rows: Tensor  # [number of requests of one token] int64, on the device: the rows of the state that take a token
    prompts: list[Prompt]


class StateMetadataBuilder(AttentionMetadataBuilder[StateMetadata]):
    """Says what a step does, without waiting for the device where all requests take one token."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention)
        if others := sorted(set(layers) - set(layer_names)):
            raise UnsupportedModelError(
                f"layers of this model differ in what they keep ({layer_names[0]} and {others[0]}): serve a model "
                f"whose layers are alike, or take {KEY!r} out of additional_config"
            )
        config = config_of(vllm_config)
        assert config is not None
        self._capacity = config.capacity
        self._plan = dataclasses.astuple(config.schedule)
        self._layers = {name: index for index, name in enumerate(layer_names)}
        self._attention = layers[layer_names[0]]
        self._state: CacheState | None = None  # until vLLM has allocated its memory
        longest = max(
            vllm_config.scheduler_config.max_num_seqs, vllm_config.compilation_config.max_cudagraph_capture_size or 0
        )
        self._rows = torch.zeros(longest, dtype=torch.int64, device=device)  # a CUDA graph reads it at this address

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StateMetadata:
        """Say what the step does, and empty the rows that it begins."""
        state, common = self._states(), common_attn_metadata
        singles = split_decodes_and_prefills(common, decode_threshold=1)[0]
        rows = self._rows[: common.num_reqs]
        rows.copy_(common.block_table_tensor[: common.num_reqs, 0])

        # A request that has nothing computed is new, or was preempted and begins again. The host knows which do.
        starts, seen = common.query_start_loc_cpu[: common.num_reqs + 1], common.seq_lens_cpu_upper_bound
        assert seen is not None
        taken = starts.diff()
        if len(begin := ((seen[: common.num_reqs] == taken) & (taken > 0)).nonzero().flatten()):
            begun = rows[begin.to(rows.device)]
            for part in (state.fill, state.position, state.queries):
                part.index_fill_(0, begun, 0)

        several = starts[singles:].tolist()
        prompts = [
            Prompt(*where)
            for where in zip(several, several[1:], rows[singles:].tolist() if several[1:] else (), strict=False)
        ]
        return StateMetadata(state, self._plan, self._layers, rows[:singles], prompts)

    def _states(self) -> CacheState:
        if self._state is None:
            memory, spec = self._attention.kv_cache, self.kv_cache_spec
            shape = CacheShape(len(self._layers), spec.num_kv_heads, spec.head_size, spec.dtype, memory.device)
            whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory.untyped_storage())
            self._state = carve(whole, shape, self._capacity, len(memory))
        return self._state


class StateAttention(AttentionImpl[StateMetadata]):
    """The attention of one layer: that of `ckv::cached_attention`, and behind the last layer `ckv::compact_`."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap, self.sinks = logits_soft_cap or 0.0, sinks
        engine = get_current_vllm_config()
        config = config_of(engine)
        assert config is not None
        kind = AttentionType(attn_type)
        asked = (alibi_slopes, sliding_window, kind, kv_sharing_target_layer_name, others)
        check(engine, config, Layer(head_size, self.num_kv_heads, kv_cache_dtype, *asked))

    def do_kv_cache_update(self, *_: Any) -> None:
        """Do nothing: where vLLM asks for this ahead of `forward`, as its CPU engine does, `forward` appends itself."""

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StateMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend with the tokens of a step.

        Args:
            layer: whose name tells its place in the state.
            query: [T, H, D].
            key, value: [T, Hkv, D].
            kv_cache: not read: the metadata has the state that lies in it.
            attn_metadata: None in a run that only measures memory.
            output: [T, H, D], which is written and returned.
            output_scale, output_block_scale: of a quantised output, which is not offered.
        """
        if attn_metadata is None:
            return output.fill_(0.0)
        step = attn_metadata
        state, plan, index = step.state, step.plan, step.layers[layer.layer_name]
        sinks = None if self.sinks is None else self.sinks.to(query.dtype)
        singles = len(step.rows)
        if singles:
            new = (part[:singles, :, None] for part in (query, key, value))
            out = cached_attention(*new, *state[:6], index, self.scale, sinks, self.softcap, *plan, rows=step.rows)
            output[:singles] = out[:, :, 0]
        for start, stop, row in step.prompts:
            new = (part[start:stop].transpose(0, 1)[None] for part in (query, key, value))
            out = cached_attention(*new, *state.row(row)[:6], index, self.scale, sinks, self.softcap, *plan)
            output[start:stop] = out[0].transpose(0, 1)
        if index == len(step.layers) - 1:
            if singles:
                compact_(*state[:7], 1, *plan, rows=step.rows)
            for start, stop, row in step.prompts:
                compact_(*state.row(row)[:7], stop - start, *plan)
        return output


class ClusteredBackend(AttentionBackend):
    """What `--attention-backend CUSTOM` chooses."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    serving: ClassVar[tuple[CKVConfig, int] | None] = None
    """The configuration and the longest request of the model that was built last; None if it did not ask for any.

    vLLM asks for specs and builders, without saying for which model, only right after it has built its layers.
    """

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's list of backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[StateAttention]:
        """The attention of a layer of the model that is being built.

        Raises:
            ConfigError: if it did not ask for a clustered cache.
        """
        if not ClusteredBackend.serve(get_current_vllm_config()):
            raise ConfigError(
                f"--attention-backend CUSTOM is that of ckv_compile, and additional_config has no {KEY!r}: pass "
                f'--additional-config \'{{"{KEY}": {{"budget": 1024}}}}\', or another backend'
            )
        return StateAttention

    @classmethod
    def serve(cls, engine: VllmConfig) -> bool:
        """Note what the model that is being built asks for, and return whether that is a clustered cache."""
        config = config_of(engine)
        ClusteredBackend.serving = None if config is None else (config, engine.model_config.max_model_len)
        return config is not None

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        """What says what a step does."""
        return StateMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """What a layer keeps of a request."""
        assert cls.serving is not None
        config, longest = cls.serving
        return StateSpec.of(spec, config.capacity, longest)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Any would do, since the memory is laid out anew."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sink(cls) -> bool:
        """Learned sinks take part in the softmax."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """A state is not made of pages of tokens."""
        return False


class CpuBackend(CPUAttentionBackend):
    """Takes the place of the one backend of vLLM's CPU engine, and is that backend unless "ckv" is asked for."""

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]:
        """The attention of a layer of the model that is being built."""
        if ClusteredBackend.serve(get_current_vllm_config()):
            return StateAttention
        return CPUAttentionBackend.get_impl_cls()

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """What says what a step does."""
        return CPUAttentionBackend.get_builder_cls() if ClusteredBackend.serving is None else StateMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """What a layer keeps of a request."""
        if ClusteredBackend.serving is None:
            return super().customize_spec(spec)
        return ClusteredBackend.customize_spec(spec)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Any: a state is not cut into blocks of a kernel."""
        if isinstance(kv_cache_spec, StateSpec):
            return [MultipleOf(1)]
        return CPUAttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec)
