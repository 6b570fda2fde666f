"""Attention over clustered states as backends of vLLM."""

import dataclasses
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
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheLayout, KVCacheSpec

from ckv_compile.cache import CacheState, Group
from ckv_compile.config import CKVConfig
from ckv_compile.errors import ConfigError, UnsupportedModelError
from ckv_compile.ops import append_, cached_attention, compact_
from ckv_compile.vllm.settings import KEY, Layer, check, config_of
from ckv_compile.vllm.state import Serving, StateSpec, carve, empty

_BLOCK = 128
"""Tokens of a block of vLLM's kernel, of which a prompt that begins takes a few."""


def _has_causal_kernel(device: torch.device, head_size: int) -> bool:
    """Whether vLLM's CPU kernel serves these heads."""
    return device.type == "cpu" and head_size in CPUAttentionBackend.get_supported_head_sizes()


class Place(NamedTuple):
    """Where the state has a layer."""

    group: Group
    layer: int  # its number in the group


class Prompt(NamedTuple):
    """A part of a prompt that a step takes: tokens `start` to `stop` of the step, for a row of the state."""

    start: int
    stop: int
    row: int


class Beginnings(NamedTuple):
    """The prompts that begin in a step on the CPU: causal attention alone, for which vLLM has a faster kernel."""

    prompts: list[Prompt]  # the last ones of the step
    metadata: CPUAttentionMetadata
    cache: Tensor  # where that kernel reads keys and values, of one layer at a time


@dataclass
class StateMetadata(AttentionMetadata):
    """What a step does, the same for all layers.

    Requests of one token come first in a step, then those that read a prompt; of these, last, those that begin one.
    """

    state: CacheState
    layers: dict[str, "Place"]  # by their names
    last: str  # the name of the last one
    plans: dict[Group, tuple[int | float, ...]]  # of the groups that have layers
    rows: Tensor  # [number of requests of one token] int64, on the device: the rows of the state that take a token
    prompts: list[Prompt]
    beginnings: Beginnings | None


class StateMetadataBuilder(AttentionMetadataBuilder[StateMetadata]):
    """Says what a step does, without waiting for the device where all requests take one token."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention)
        first = layers[layer_names[0]]
        if others := sorted(
            name for name, each in layers.items() if name not in layer_names or each.num_heads != first.num_heads
        ):
            raise UnsupportedModelError(
                f"layers of this model differ in what they keep ({layer_names[0]} and {others[0]}): serve a model "
                f"whose layers are alike, or take {KEY!r} out of additional_config"
            )
        config = config_of(vllm_config)
        assert config is not None
        self._serving = serving_of(vllm_config, config)
        groups: list[Group] = ["light" if i in config.light_layers else "main" for i in range(len(layer_names))]
        self._layers = {
            name: Place(group, groups[:i].count(group))
            for i, (name, group) in enumerate(zip(layer_names, groups, strict=True))
        }
        plans = self._serving.plans
        self._plans: dict[Group, tuple[int | float, ...]] = {"main": dataclasses.astuple(plans.main.schedule)}
        if config.light_layers:
            self._plans["light"] = dataclasses.astuple(plans.light.schedule)
        self._attention = first
        self._state: CacheState | None = None  # until vLLM has allocated its memory
        longest = max(
            vllm_config.scheduler_config.max_num_seqs, vllm_config.compilation_config.max_cudagraph_capture_size or 0
        )
        self._rows = torch.zeros(longest, dtype=torch.int64, device=device)  # a CUDA graph reads it at this address
        self._causal: CPUAttentionMetadataBuilder | None = None
        if _has_causal_kernel(device, kv_cache_spec.head_size):
            shape = {"num_kv_heads": kv_cache_spec.num_kv_heads, "head_size": kv_cache_spec.head_size}
            pages = FullAttentionSpec(block_size=_BLOCK, dtype=kv_cache_spec.dtype, **shape)
            self._causal = CPUAttentionMetadataBuilder(pages, layer_names, vllm_config, device)

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
        begin = ((seen[: common.num_reqs] == taken) & (taken > 0)).nonzero().flatten()
        if len(begin):
            empty(state, rows[begin.to(rows.device)])

        prompts, beginnings = [], None
        if singles < common.num_reqs:
            bounds = starts[singles:].tolist()
            prompts = [Prompt(*where) for where in zip(bounds, bounds[1:], rows[singles:].tolist(), strict=False)]
        if self._causal is not None:
            going_on, new = len(prompts), set((begin - singles).tolist())
            while going_on and going_on - 1 in new:
                going_on -= 1
            if going_on < len(prompts):
                beginnings = self._beginnings(self._causal, prompts[going_on:])
                prompts = prompts[:going_on]
        last = next(reversed(self._layers))
        return StateMetadata(state, self._layers, last, self._plans, rows[:singles], prompts, beginnings)

    def _beginnings(self, causal: CPUAttentionMetadataBuilder, prompts: list[Prompt]) -> Beginnings:
        """Give each prompt blocks of its own in a cache that lives for this step."""
        lengths = torch.tensor([prompt.stop - prompt.start for prompt in prompts], dtype=torch.int32)
        starts = torch.tensor([prompts[0].start, *(prompt.stop for prompt in prompts)], dtype=torch.int32)
        blocks = (lengths + _BLOCK - 1) // _BLOCK
        first = blocks.cumsum(0, dtype=torch.int32) - blocks
        longest = int(lengths.max())
        common = CommonAttentionMetadata(
            query_start_loc=starts - starts[0],
            query_start_loc_cpu=starts - starts[0],
            seq_lens=lengths,
            num_reqs=len(prompts),
            num_actual_tokens=prompts[-1].stop - prompts[0].start,
            max_query_len=longest,
            max_seq_len=longest,
            block_table_tensor=first[:, None] + torch.arange(int(blocks.max()), dtype=torch.int32),
            slot_mapping=torch.cat(
                [torch.arange(length) + block * _BLOCK for length, block in zip(lengths, first, strict=True)]
            ),
        )
        spec = self.kv_cache_spec
        cache = torch.zeros(int(blocks.sum()), spec.num_kv_heads, _BLOCK, 2 * spec.head_size, dtype=spec.dtype)
        return Beginnings(prompts, causal.build(0, common), cache)

    def _states(self) -> CacheState:
        if self._state is None:
            memory = self._attention.kv_cache
            whole = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory.untyped_storage())
            self._state = carve(whole, self._serving, self.kv_cache_spec, len(memory))
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
        self._causal: CPUAttentionBackendImpl | None = None
        if _has_causal_kernel(torch.device(engine.device_config.device_type), head_size):
            heads = (num_heads, head_size, scale, self.num_kv_heads)
            self._causal = CPUAttentionBackendImpl(*heads, None, None, kv_cache_dtype, logits_soft_cap, sinks=sinks)

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
        place = step.layers[layer.layer_name]
        plan = step.plans[place.group]
        sinks = None if self.sinks is None else self.sinks.to(query.dtype)
        singles = len(step.rows)
        if singles:
            new = (part[:singles, :, None] for part in (query, key, value))
            slots = _slots(step.state, place.group)
            out = cached_attention(*new, *slots, place.layer, self.scale, sinks, self.softcap, *plan, rows=step.rows)
            output[:singles] = out[:, :, 0]
        for start, stop, row in step.prompts:
            new = (part[start:stop].transpose(0, 1)[None] for part in (query, key, value))
            slots = _slots(step.state.row(row), place.group)
            out = cached_attention(*new, *slots, place.layer, self.scale, sinks, self.softcap, *plan)
            output[start:stop] = out[0].transpose(0, 1)
        if step.beginnings is not None:
            self._begin(step, step.beginnings, layer, query, key, value, output)
        if layer.layer_name == step.last:
            if singles:
                _close(step.state, 1, step.plans, step.rows)
            for start, stop, row in (*step.prompts, *(step.beginnings.prompts if step.beginnings else ())):
                _close(step.state.row(row), stop - start, step.plans)
        return output

    def _begin(
        self,
        step: StateMetadata,
        beginnings: Beginnings,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
    ) -> None:
        """Let vLLM's kernel attend to the prompts that begin, and put them into their states."""
        assert self._causal is not None
        prompts, metadata, cache = beginnings
        begun = slice(prompts[0].start, prompts[-1].stop)
        new = (key[begun], value[begun])
        self._causal.do_kv_cache_update(layer, *new, cache, metadata.slot_mapping)
        self._causal.forward(layer, query[begun], *new, cache, metadata, output[begun])
        group, index = step.layers[layer.layer_name]
        for start, stop, row in prompts:
            q, k, v = (part[start:stop].transpose(0, 1)[None] for part in (query, key, value))
            append_(k, v, *step.state.row(row), index, group, *step.plans[group], q=q, scale=self.scale)


def _slots(state: CacheState, group: Group) -> tuple[Tensor, ...]:
    return state.light if group == "light" else state.main


def _close(
    state: CacheState, tokens: int, plans: dict[Group, tuple[int | float, ...]], rows: Tensor | None = None
) -> None:
    """Compact what is due at the end of a step; the main group comes last, and counts the positions."""
    for group in reversed(plans):
        position = state.position if group == "main" else None
        compact_(*_slots(state, group)[:7], position, tokens, *plans[group], rows=rows)


def serving_of(engine: VllmConfig, config: CKVConfig) -> Serving:
    """What the layers of this process keep of a request."""
    model, parallel = engine.model_config, engine.parallel_config
    heads = model.get_num_attention_heads(parallel)
    return Serving(config, model.max_model_len, model.get_num_layers(parallel), heads)


class ClusteredBackend(AttentionBackend):
    """What `--attention-backend CUSTOM` chooses."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    serving: ClassVar[Serving | None] = None
    """What the layers of the model keep that was built last; None if it did not ask for a clustered cache.

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
        ClusteredBackend.serving = None if config is None else serving_of(engine, config)
        return config is not None

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        """What says what a step does."""
        return StateMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """What a layer keeps of a request."""
        assert cls.serving is not None
        return StateSpec.of(spec, cls.serving)

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
