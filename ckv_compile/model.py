"""The compiled causal LM: prefill, decode step, and transformers' own generate() around them."""

import contextlib
import copy
import functools
import hashlib
import importlib.util
import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMode,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from ckv_compile import artifact, snapshot
from ckv_compile.cache import CacheShape, CacheState, ClusteredCache
from ckv_compile.capture import device_of
from ckv_compile.config import CKVConfig
from ckv_compile.errors import (
    CompileError,
    ConcurrentUseError,
    ConfigError,
    InputError,
    UnsupportedModelError,
)
from ckv_compile.inputs import (
    check_continuation,
    check_mask_shape,
    check_positions,
    check_range,
    check_shape,
    left_padding,
)
from ckv_compile.pipeline import (
    CompileMode,
    PassResult,
    Program,
    Rewritten,
    check_mode,
    decode_program,
    rewrite,
)
from ckv_compile.runtime import DecodeStep, Sampler, decode_loop

log = logging.getLogger("ckv_compile")

# transformers renames the cache argument and output from `past_key_values` to `cache`.
_CACHE_NAME = "cache" if "cache" in inspect.signature(CausalLMOutputWithPast).parameters else "past_key_values"
_KEPT_STEPS = 4
Progress = Callable[[int, int], None]
"""Told the tokens that are prefilled and how many there are."""
_GENERATION_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def transform(
    model: nn.Module,
    config: CKVConfig | None = None,
    *,
    compile: str = "inductor",
    **options: Any,
) -> "CKVForCausalLM":
    """Return a model that generates with a clustered KV cache of fixed size.

        model = ckv_compile.transform(model, budget=1024)
        model.generate(**inputs, max_new_tokens=200)

    Args:
        model: a decoder-only Hugging Face causal LM on one device, the CPU or a CUDA device; or a module of your own
            with forward(input_ids [B, S], position_ids [B, S]) -> logits [B, S, vocab] that attends by
            scaled_dot_product_attention. It is not changed, and the result shares its weights.
        config: the configuration; or pass its fields as options, `budget` at least (see `CKVConfig`).
        compile: "inductor" compiles the decode step at its first use and on CUDA records it as a CUDA graph;
            "inductor-no-cudagraphs" only compiles it; "eager" runs the same graph uncompiled.
        **options: fields of `CKVConfig`.

    Raises:
        ConfigError: for a bad or unknown option.
        UnsupportedModelError: for a model that cannot be captured or rewritten, with the reason.
    """
    mode = check_mode(compile)
    rewritten, config = rewrite_model(model, config, options)
    is_pretrained = isinstance(model, PreTrainedModel)
    saved = artifact.Saved(
        rewritten,
        config,
        copy.deepcopy(model.config) if is_pretrained else PreTrainedConfig(vocab_size=rewritten.vocabulary),
        copy.deepcopy(model.generation_config) if is_pretrained else GenerationConfig(),
    )
    ours = CKVForCausalLM(saved, mode)
    ours.train(model.training)
    return ours


def rewrite_model(model: nn.Module, config: CKVConfig | None, options: dict[str, Any]) -> tuple[Rewritten, CKVConfig]:
    """Check a model and a config, or the options of one, and return the rewritten model and the resolved config."""
    if config is not None and options:
        raise ConfigError(f"pass either a config or options, not both (options: {', '.join(options)})")
    config = config if config is not None else CKVConfig.from_options(options)
    _check_model(model)
    text_config = model.config.get_text_config(decoder=True) if isinstance(model, PreTrainedModel) else None
    config = config.resolve(getattr(text_config, "max_position_embeddings", None))
    with _programs_run_on(device_of(model)):
        return rewrite(model, config), config


def allocate_cache(shape: CacheShape, config: CKVConfig, batch_size: int, **of_original: Any) -> ClusteredCache:
    """Allocate an empty cache of a rewritten model, or with the last arguments of `ClusteredCache` for an original one.

    Raises:
        InputError: for a batch size outside 1..max_batch_size.
    """
    check_batch_size(batch_size)
    limit, plans = config.max_batch_size, config.plans(shape.clustered)
    if batch_size > limit:
        raise InputError(
            f"a batch of {batch_size} rows; this model was transformed for 1 to {limit}: "
            "use fewer rows, or pass a larger max_batch_size"
        )
    with torch.inference_mode(False):
        state = CacheState.planned(shape, plans, batch_size)
    return ClusteredCache(shape, plans, state, **of_original)


def check_batch_size(batch_size: int) -> None:
    """Refuse what is no number of rows.

    Raises:
        InputError: with what it should be.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InputError(f"batch_size={batch_size!r}: pass an int of at least 1")


def load(
    path: str | os.PathLike[str], *, device: str | torch.device | None = None, compile: str | None = None
) -> "CKVForCausalLM":
    """Load a model that `CKVForCausalLM.save_pretrained` wrote, without the code of the model it was made of.

    Nothing is loaded unless every file is as it was saved. The weights of a model on the CPU stay in their file, of
    which all processes that load it share one copy in memory: do not write to it while they run.

    Args:
        path: the folder.
        device: None takes the one that it was saved on; no other can be given.
        compile: a mode of `transform`; or "aot", which uses the decode steps that were compiled when it was saved and
            compiles those of other batch sizes at their first use. None is "aot" where there are some that this machine
            can run, and "inductor" elsewhere.

    Raises:
        ConfigError: for a mode that does not exist.
        ArtifactError: if the folder is damaged, no artifact, or cannot be used here, with the reason.
        OSError: if a file cannot be read.
    """
    with torch.inference_mode(False):  # weights outlive the mode that a caller is in
        loaded = artifact.read(path, device=device, compile=compile)
    return CKVForCausalLM(loaded.saved, loaded.mode, loaded.programs)


class CKVForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A causal LM whose attention reads a clustered KV cache of budget + interval slots per KV head.

    Made by `transform`, or by `load` of what `save_pretrained` wrote. `generate()` is transformers' own, for greedy
    search and sampling: the options of every version, checked and prepared by transformers. Where they allow (greedy,
    temperature, top-k, top-p, min-p, repetition penalty, end-of-sequence tokens, streamers), tokens come from
    `runtime.decode_loop`; for all others from transformers' own loop, one `forward` a token.

    A prompt is prefilled row by row without its padding, and a row of a batch never depends on its neighbours. The
    decode program of each batch size is compiled at its first use; `warm_up` does that ahead.

    On the CPU each call to `generate` allocates a cache for its rows and drops it with its result. On CUDA the model
    keeps the cache of the last call for the next one of as many rows, since recorded steps are bound to its addresses;
    `release` gives it back. A cache that a call returns is the caller's, and so are the steps recorded for it.
    """

    config_class = PreTrainedConfig
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(
        self, saved: artifact.Saved, mode: CompileMode, programs: Mapping[int, Program] = MappingProxyType({})
    ) -> None:
        rewritten, config, own_config, generation_config = saved
        own_config._attn_implementation = "sdpa"
        own_config._experts_implementation = "eager"  # of this class, which has no experts: they are in the graph
        super().__init__(own_config)
        self.generation_config = generation_config
        self.ckv_config = config
        self.cache_shape = rewritten.shape
        self.graph = rewritten.graph
        self._rewritten = rewritten
        self._mode = mode
        self._decode_programs = dict(programs)  # by the rows that they serve
        self._steps: weakref.WeakKeyDictionary[ClusteredCache, list[DecodeStep]] = weakref.WeakKeyDictionary()
        self._records = mode == "inductor" and rewritten.shape.device.type == "cuda"
        self._idle: ClusteredCache | None = None  # of the last call; its recorded steps are bound to it
        self._lent: ClusteredCache | None = None  # to the generate() that runs
        self._progress: Progress | None = None  # of the generate() that runs
        self._running = threading.RLock()
        self.eval()

    @property
    def passes(self) -> tuple[PassResult, ...]:
        """The passes that made the rewritten graph, in order, with the sites each rewrote."""
        return self._rewritten.passes

    def new_cache(self, batch_size: int = 1) -> ClusteredCache:
        """Allocate an empty cache, to pass to `forward` or `generate` and keep across calls.

        Raises:
            InputError: for a batch size outside 1..max_batch_size.
        """
        return allocate_cache(self.cache_shape, self.ckv_config, batch_size)

    def save_cache(self, cache: ClusteredCache, path: str | os.PathLike[str]) -> None:
        """Write a cache of this model to a safetensors file, its used slots alone, whole or not at all.

        Raises:
            InputError: if it is another model's, or a step of it was interrupted half-way.
        """
        self._check_cache(cache)
        snapshot.save(cache, path, self._fingerprint)

    def load_cache(self, path: str | os.PathLike[str]) -> ClusteredCache:
        """Read a cache that `save_cache` wrote, in this process or another, to go on from.

        Raises:
            InputError: if the file is of another format, model or configuration.
        """
        plans, most_rows = self._rewritten.plans, self.ckv_config.max_batch_size
        return snapshot.load(path, self._fingerprint, self.cache_shape, plans, most_rows)

    @functools.cached_property
    def _fingerprint(self) -> str:
        """What tells this model from others of its shape: a checksum and some numbers of every weight and buffer."""
        digest = hashlib.sha256()
        for name, tensor in (*self.graph.named_parameters(), *self.graph.named_buffers()):
            flat = tensor.detach().contiguous().flatten()
            integers = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
            # A sum of integers is the same in any order; the sample tells permutations apart.
            where = torch.randint(
                max(1, len(flat)), (min(len(flat), 1000),), generator=torch.Generator().manual_seed(0)
            )
            sample = integers[where.to(integers.device)].tolist()
            digest.update(f"{name} {tuple(tensor.shape)} {int(integers.sum(dtype=torch.int64))} {sample}".encode())
        return digest.hexdigest()

    def warm_up(self, batch_size: int = 1) -> None:
        """Compile the decode step of a batch size, so that the first token does not wait for it.

        What is left for the first `generate` on CUDA is to record it with that call's sampling.

        Raises:
            CompileError: if it cannot be compiled here, with the reason.
            ConcurrentUseError: if another thread is using this model.
        """
        with self._exclusive():
            cache = self._borrow_cache(batch_size)
            self._compile(cache)
            self._return_cache(cache)

    def release(self) -> None:
        """Give back the cache and the recorded steps that are kept on CUDA between calls to `generate`."""
        self._idle = None

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        progress: bool | Progress = False,
        **kwargs: Any,
    ) -> Any:
        """Generate as transformers does, by greedy search or sampling.

        Args:
            inputs: the prompt [B, S].
            generation_config: transformers' own.
            progress: show how far the prefill is in a bar, or call a function with the tokens that are done and their
                number. It moves once a row, or once a chunk with `prefill_chunk`.
            **kwargs: whatever transformers' `generate` takes.

        Raises:
            InputError: for an empty prompt, token ids out of range, too many rows, or beam search.
            ConcurrentUseError: if another thread is using this model.
        """
        with self._exclusive(), _shown(progress) as show:
            prompt = inputs if inputs is not None else kwargs.get("input_ids")
            if prompt is not None:
                check_shape(prompt)
                check_range(prompt, self._rewritten.vocabulary)
                check_continuation(prompt, kwargs)
            if (given := kwargs.pop("past_key_values", None)) is not None:
                kwargs[_CACHE_NAME] = given  # newer versions warn of the older name
            self._progress = show
            try:
                output = super().generate(inputs, generation_config, **kwargs)
                if self._lent is not None and isinstance(output, Tensor):  # else the caller has the cache
                    self._return_cache(self._lent)
                return output
            finally:
                self._lent = self._progress = None

    def save_pretrained(
        self,
        path: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        aot: Sequence[int] = (),
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Write this model to a folder from which `ckv_compile.load` brings it back, whole or not at all.

        Args:
            path: the folder; an artifact that is there already is replaced, anything else is refused.
            tokenizer: the tokenizer, to save with it.
            aot: batch sizes whose decode step is compiled now, for machines like this one, so that the first token
                need not wait for it.
            max_shard_size: bytes of a file of weights, at most, as a number or like "5GB".

        Raises:
            ArtifactError: if the folder holds something else, or the model has what the format cannot hold.
            ConfigError: for batch sizes that this model does not serve, or a size that is none.
            CompileError: if a step cannot be compiled here.
            ConcurrentUseError: if another thread is using this model.
            OSError: if a file cannot be written.
        """
        saved = artifact.Saved(self._rewritten, self.ckv_config, self.config, self.generation_config)
        with self._exclusive(), _programs_run_on(self.device):
            artifact.save(saved, path, tokenizer=tokenizer, aot=aot, max_shard_size=max_shard_size)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: ClusteredCache | None = None,
        past_key_values: ClusteredCache | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 1,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ClusteredCache]:
        """Advance a cache by some tokens and return the logits of the last one.

        Args:
            input_ids: [B, S] int64; S = 1 is a decode step, a longer one a prompt or a later turn.
            attention_mask: [B, columns in the cache + S]; zeros at the left of its last S columns are padding, which
                is skipped. None where there is no padding. At a decode step a row whose last column is zero takes no
                token, its logits mean nothing, and the other columns are not looked at.
            cache: the cache to continue (`past_key_values` is its older name); None starts a new one.
            use_cache: must be true.
            logits_to_keep: must be 1.
            output_attentions: must be false; there are no attention weights of single tokens.
            output_hidden_states: must be false.
            return_dict: False returns (logits, cache).

        Returns:
            logits [B, 1, vocab] and the cache.

        Raises:
            InputError: for arguments that cannot be served; the cache is then as it was.
            ConcurrentUseError: if another thread is using this model.
        """
        if not use_cache or logits_to_keep != 1 or output_attentions or output_hidden_states:
            raise InputError(
                "a compiled model needs use_cache=True and logits_to_keep=1 and has no attentions or hidden states to "
                f"return (got use_cache={use_cache}, logits_to_keep={logits_to_keep}, "
                f"output_attentions={output_attentions}, output_hidden_states={output_hidden_states})"
            )
        cache = cache if cache is not None else past_key_values
        with self._exclusive(), _programs_run_on(self.device):
            check_shape(input_ids)
            cache = cache if cache is not None else self.new_cache(input_ids.shape[0])
            self._check_cache(cache, input_ids)
            steps, limit = input_ids.shape[1], self._rewritten.positions
            if steps > 1 or not cache.columns or not input_ids.is_cuda:
                # Not the tokens of a step on CUDA: that would wait for the device.
                check_range(input_ids, self._rewritten.vocabulary)
            padding = [0] * cache.batch_size
            if steps > 1 or not cache.columns:
                padding = left_padding(attention_mask, cache, input_ids)
            if limit is not None and cache.columns + steps > limit:  # columns, since the host knows them
                seen = cache.state.position.tolist()
                check_positions(max(n + steps - pad for n, pad in zip(seen, padding, strict=True)), limit)
            if steps > 1:
                logits = self._prefill_rows(input_ids, padding, cache)
            else:
                logits = self._decode(input_ids, attention_mask, cache)
        if return_dict is False:
            return logits, cache
        return CausalLMOutputWithPast(logits=logits, **{_CACHE_NAME: cache})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CKVForCausalLM":
        """Refuse to move or cast: the programs are made for the weights as they are, which the original shares."""
        probe = fn(torch.empty(0, dtype=self.cache_shape.dtype, device=self.cache_shape.device))
        if probe.dtype != self.cache_shape.dtype or probe.device != self.cache_shape.device:
            raise UnsupportedModelError(
                f"a compiled model cannot be moved or cast (to {probe.dtype} on {probe.device}): "
                "move or cast the original model, then transform() it again"
            )
        return self

    def _compile(self, cache: ClusteredCache) -> None:
        """Compile the decode step of the batch size of a cache, which is left as it is."""
        rows, active = cache.batch_size, cache.state.active
        if self._mode == "eager" or rows in self._decode_programs:
            return
        with _programs_run_on(self.device):
            program = decode_program(self._rewritten, cache.state)
            before = active.clone()
            active.fill_(False)
            try:
                program(torch.zeros(rows, 1, dtype=torch.int64, device=self.device), *cache.state)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise CompileError(
                    f"the decode step could not be compiled ({type(error).__name__}: {error}); Inductor needs a C++ "
                    'compiler on the CPU and Triton on CUDA; transform(..., compile="eager") does without'
                ) from error
            finally:
                active.copy_(before)
        self._decode_programs[rows] = program

    def _prefill_rows(self, input_ids: Tensor, padding: list[int], cache: ClusteredCache) -> Tensor:
        """Advance a cache by [B, S] tokens, row by row and each without its padding; return the last logits."""
        ids = input_ids.to(torch.int64, copy=True)
        cache.state.active.fill_(True)
        cache.broken = True  # until every layer and row of this step is in it
        done, total = 0, ids.numel() - sum(padding)
        rows = []
        for b, pad in enumerate(padding):
            for chunk in ids[b : b + 1, pad:].split(self.ckv_config.prefill_chunk or ids.shape[1], dim=1):
                logits = self.graph(chunk, *cache.state.row(b))[0]
                done += chunk.shape[1]
                if self._progress is not None:
                    self._progress(done, total)
            rows.append(logits)
        cache.columns += ids.shape[1]
        cache.broken = False
        return torch.cat(rows)

    def _decode(self, input_ids: Tensor, attention_mask: Tensor | None, cache: ClusteredCache) -> Tensor:
        """Advance a cache by one token a row [B, 1]; return the logits."""
        step = self._decode_step(cache, sampler=None)
        if attention_mask is None:
            cache.state.active.fill_(True)
        else:
            check_mask_shape(attention_mask, cache, input_ids)
            cache.state.active.copy_(attention_mask[:, -1])
        step.ids.copy_(input_ids)
        cache.broken = True
        step.run()
        cache.columns += 1
        cache.broken = False
        return step.logits.clone()  # the step writes the next ones to the same place

    def _decode_step(self, cache: ClusteredCache, sampler: Sampler | None) -> DecodeStep:
        """The decode step of a cache, made at its first use; the last few kinds of sampling are kept with the cache."""
        kept = self._steps.setdefault(cache, [])
        for step in kept:
            if (step.sampler and step.sampler.key) == (sampler and sampler.key):
                return step
        self._compile(cache)
        program: Program = self._decode_programs.get(cache.batch_size, self.graph)
        with _programs_run_on(self.device):
            step = DecodeStep(program, cache.state, sampler, self._rewritten.vocabulary, self._records)
        kept[:] = [*kept[-_KEPT_STEPS + 1 :], step]
        return step

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Generate by our own loop where the options allow, else by transformers'.

        They differ in what a row takes after its end, while others go on: nothing, or padding as if it were tokens.
        """
        obstacle = Sampler.obstacle(logits_processor, stopping_criteria)
        wanted = [name for name in ("output_scores", "output_logits") if getattr(generation_config, name)]
        if synced_gpus or obstacle or (wanted and generation_config.return_dict_in_generate):
            log.info("generating by transformers' own loop, for %s", obstacle or ", ".join(wanted) or "synced_gpus")
            return super()._sample(
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
            )
        cache: ClusteredCache = model_kwargs[_CACHE_NAME]
        self._check_cache(cache, input_ids)
        sampler = Sampler(
            logits_processor,
            stopping_criteria,
            generation_config.do_sample,
            generation_config._pad_token_tensor,
            self.device,
        )
        length = min(
            criterion.max_length for criterion in stopping_criteria if isinstance(criterion, MaxLengthCriteria)
        )
        if self._rewritten.positions is not None:
            mask = model_kwargs.get("attention_mask")
            width = input_ids.shape[1]
            # Of the longest row, cached or not; transformers keeps no mask that hides nothing, only its length.
            known = getattr(generation_config, "_mask_length", width) if mask is None else int(mask.sum(dim=1).max())
            check_positions(known + length - width - 1, self._rewritten.positions)  # the last token is not fed back
        step = self._decode_step(cache, sampler)  # before the prefill: whatever fails should not come after it
        logits = self._prefill(input_ids, generation_config, model_kwargs).logits
        with _programs_run_on(self.device):
            tokens = decode_loop(step, cache, input_ids, logits, sampler, length, streamer)
        if streamer is not None:
            streamer.end()
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=tokens, **{_CACHE_NAME: cache})
        return tokens

    def _borrow_cache(self, batch_size: int) -> ClusteredCache:
        """An empty cache: the one that was kept, if it has as many rows, or a new one."""
        cache, self._idle = self._idle, None
        if cache is None or cache.batch_size != batch_size:
            del cache  # before the next one is allocated
            return self.new_cache(batch_size)
        cache.reset()
        return cache

    def _return_cache(self, cache: ClusteredCache) -> None:
        """Keep a cache that nobody else holds for the next call, if a recorded step is bound to it."""
        if self._records:
            self._idle = cache

    def _check_cache(self, cache: ClusteredCache, input_ids: Tensor | None = None) -> None:
        if not isinstance(cache, ClusteredCache):
            raise InputError(
                f"a compiled model cannot continue a {type(cache).__name__}: pass a cache that it returned, or "
                "new_cache()"
            )
        if cache.groups is not None:
            raise InputError(
                'a cache made by cache_for() is for the original model, compiled by the backend "ckv": pass one that '
                "this model returned, or new_cache()"
            )
        found, expected = (cache.shape, cache.plans), (self.cache_shape, self._rewritten.plans)
        if found != expected:
            raise InputError(f"a cache of another model or config, {found}; this model's are {expected}")
        cache.check_whole()
        if input_ids is not None and cache.batch_size != input_ids.shape[0]:
            raise InputError(f"{input_ids.shape[0]} rows of tokens for a cache of {cache.batch_size} rows")

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            raise ConcurrentUseError(
                "another thread is using this model; wait for it, or give each thread a transform() of its own "
                "(they share the weights)"
            )
        try:
            yield
        finally:
            self._running.release()

    def _validate_generation_mode(self, generation_mode: Any, generation_config: Any, *args: Any) -> None:
        if generation_mode not in _GENERATION_MODES:
            raise InputError(
                f"{generation_mode.value} is not supported: it reorders or rolls back the cache, and merged tokens "
                "cannot be taken apart again; use greedy search or sampling (num_beams=1, no assistant model)"
            )
        if not generation_config.use_cache:
            raise InputError("use_cache=False is not supported: the clustered cache is what this model generates with")
        if generation_config.prefill_chunk_size is not None:
            raise InputError(
                f"prefill_chunk_size={generation_config.prefill_chunk_size} cuts columns, padding included, and is not "
                "supported: pass prefill_chunk= to transform()"
            )
        if generation_config.cache_implementation is not None:
            raise InputError(
                f"cache_implementation={generation_config.cache_implementation!r} is not supported: "
                "this model brings its own cache"
            )
        super()._validate_generation_mode(generation_mode, generation_config, *args)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        given = model_kwargs.pop("past_key_values", None)
        given = given if given is not None else model_kwargs.pop("cache", None)
        rows = batch_size * generation_config.num_return_sequences
        if given is None:
            given = self._lent = self._borrow_cache(rows)
            self._compile(given)  # before the prefill: whatever fails should not come after it
        model_kwargs[_CACHE_NAME] = given


@contextlib.contextmanager
def _shown(progress: bool | Progress) -> Iterator[Progress | None]:
    """What `generate(progress=...)` asks for, as a function of the tokens that are done and their number."""
    if not isinstance(progress, bool):
        if not callable(progress):
            raise InputError(f"progress={progress!r}: pass True, False, or a function of two numbers of tokens")
        yield progress
        return
    if not progress:
        yield None
        return
    with tqdm(desc="prefill", unit="token") as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)
            if done == total:
                bar.close()  # or the time of decoding would count

        yield show


@contextlib.contextmanager
def _programs_run_on(device: torch.device) -> Iterator[None]:
    """The context of every program: no autograd, the dtype that it was captured in, and its device the current one."""
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(torch.inference_mode(False))
        contexts.enter_context(torch.no_grad())
        contexts.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            contexts.enter_context(torch.cuda.device(device))
        yield


def _check_model(model: nn.Module) -> None:
    name = type(model).__name__
    if isinstance(model, CKVForCausalLM):
        raise UnsupportedModelError("this model is already transformed: call transform() on the original model")
    if isinstance(model, PreTrainedModel):
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError(f"{name} is an encoder-decoder; only decoder-only models can be transformed")
        if not model.can_generate() or model.get_output_embeddings() is None:
            raise UnsupportedModelError(f"{name} has no language-model head: load it as a ...ForCausalLM")
    elif not isinstance(model, nn.Module) or not {"input_ids", "position_ids"} <= {
        *inspect.signature(model.forward).parameters
    }:
        raise UnsupportedModelError(
            "transform() takes a transformers PreTrainedModel, or a module of forward(input_ids, position_ids), "
            f"got {name}"
        )
    devices = sorted({str(tensor.device) for tensor in (*model.parameters(), *model.buffers())})
    if len(devices) != 1:
        raise UnsupportedModelError(
            f"the model lies on several devices ({', '.join(devices)}): move it to one first"
            if devices
            else f"{name} has no parameters"
        )
    device_type = torch.device(devices[0]).type
    if device_type not in ("cpu", "cuda"):
        raise UnsupportedModelError(f"the model lies on {devices[0]}: it must be on the CPU or on a CUDA device")
    if device_type == "cuda" and importlib.util.find_spec("triton") is None:
        raise UnsupportedModelError(f"the model lies on {devices[0]}, where the kernels need Triton: install triton")
