"""NVIDIA's kvpress, asked over a pipe: run by its path in the environment that `make peers` makes, never imported.

kvpress counts what is removed, and we count what is kept: jobs say slots, and a press gets the compression ratio that
leaves as many.

Presses are those that need no training, keep as many tokens in every head and layer, and free them. Left out are those
that need statistics, gates, filters or curves of the model (DuoAttention, QFilter, KVzap, FastKVzip, DMS, LU-KV,
RestoreKV, ExpectedAttentionStats); those that only mask, by a patched attention (AdaKV, CriticalAdaKV, KVzip, KVgrad,
unstructured KVCompose); those that need all attention weights (ObservedAttention, KVCompose); those that compress while
tokens are generated (Decoding, CaM); and those that drop whole chunks, channels or layers (ChunkKV, ThinK, SimLayerKV,
PyramidKV), which cannot be given a number of slots.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from serving import Clock, peak_bytes, serve

FULL = "full"
PRESSES: dict[str, Callable[[Any, float], Any]] = {
    "keydiff": lambda kvpress, ratio: kvpress.KeyDiffPress(ratio),
    "keydiff-blocks": lambda kvpress, ratio: kvpress.BlockPress(kvpress.KeyDiffPress(ratio)),  # as in KeyDiff's paper
    "tova": lambda kvpress, ratio: kvpress.TOVAPress(ratio),
    "snapkv": lambda kvpress, ratio: kvpress.SnapKVPress(ratio),
    "expected-attention": lambda kvpress, ratio: kvpress.ExpectedAttentionPress(ratio),
    "knorm": lambda kvpress, ratio: kvpress.KnormPress(ratio),
    "streaming-llm": lambda kvpress, ratio: kvpress.StreamingLLMPress(ratio),
    "merging-keydiff": lambda kvpress, ratio: kvpress.MergingPress(kvpress.KeyDiffPress(ratio)),
    "merging-snapkv": lambda kvpress, ratio: kvpress.MergingPress(kvpress.SnapKVPress(ratio)),
    "merging-expected-attention": lambda kvpress, ratio: kvpress.MergingPress(kvpress.ExpectedAttentionPress(ratio)),
    "compactor": lambda kvpress, ratio: kvpress.CompactorPress(ratio),
    "leverage": lambda kvpress, ratio: kvpress.LeverageScorePress(ratio),
    "non-causal": lambda kvpress, ratio: kvpress.NonCausalAttnPress(ratio),
    "lagkv": lambda kvpress, ratio: kvpress.LagKVPress(ratio),
    "cur": lambda kvpress, ratio: kvpress.CURPress(ratio),
    "cap": lambda kvpress, ratio: kvpress.CapPress(ratio),
    "critical-snapkv": lambda kvpress, ratio: kvpress.CriticalKVPress(kvpress.SnapKVPress(ratio)),
    "critical-expected-attention": lambda kvpress, ratio: kvpress.CriticalKVPress(
        kvpress.ExpectedAttentionPress(ratio, use_vnorm=False)  # which CriticalKV replaces
    ),
}
"""The presses, by name."""
PROTOCOLS = ("inside", "after")

Compressions = Sequence[tuple[str, int]]
"""Presses with the slots per KV head that they keep; FULL keeps all tokens, whatever its slots are."""


class Adapter:
    """A model of transformers, and what is benchmarked on it."""

    def __init__(self) -> None:
        self.loaded: tuple[Any, ...] | None = None
        self.model: Any = None
        self.round: Callable[[], dict[str, Any]] | None = None

    def evaluate(
        self,
        model: str,
        context: list[int],
        question: list[int],
        tokens: int,
        protocol: str,
        compressions: Compressions,
        dtype: str = "float32",
        device: str = "cpu",
        threads: int | None = None,
    ) -> dict[str, Any]:
        """Compress a prompt by every press, and generate greedily.

        Args:
            model: folder or hub id.
            context: token ids.
            question: token ids that follow.
            tokens: to generate, also behind the end of a reply.
            protocol: "inside" compresses context and question together, and the first token of the reply comes from the
                exact prefill; "after" compresses the context, and the question is read as a later turn.
            compressions: presses and slots.
            dtype: of the weights.
            device: of the weights.
            threads: of torch on the CPU; None is its own choice.

        Returns:
            "replies": token ids of every compression.
        """
        if protocol not in PROTOCOLS:
            raise ValueError(f"protocol={protocol!r}: choose one of {', '.join(PROTOCOLS)}")
        if tokens < 1:
            raise ValueError(f"tokens={tokens}: generate at least 1")
        inside = protocol == "inside"
        prompt = context + question if inside else context
        _check(compressions, len(prompt))
        if not inside and not question:
            raise ValueError("protocol='after' reads a question behind the compressed context, and it has no tokens")
        self._load(model, dtype, device, threads)

        import torch

        replies: list[list[int]] = [[] for _ in compressions]
        with torch.no_grad():
            logits, caches = self._prefill(prompt, compressions)
            for which, cache in _batched(caches):
                new = logits[:, -1].argmax(dim=-1, keepdim=True).expand(len(which), -1)
                position = len(prompt)
                if not inside:
                    turn = torch.tensor([question] * len(which), device=device)
                    new, position = self._step(turn, cache, position), position + len(question)
                found = [new]
                while len(found) < tokens:
                    new, position = self._step(new, cache, position), position + 1
                    found.append(new)
                for i, reply in zip(which, torch.cat(found, dim=1).tolist(), strict=True):
                    replies[i] = reply
        return {"replies": replies}

    def predict(
        self,
        model: str,
        text: list[int],
        predicted: int,
        compressions: Compressions,
        dtype: str = "float32",
        device: str = "cpu",
        threads: int | None = None,
    ) -> dict[str, Any]:
        """Predict the last tokens of a text, each after the real ones before it, with every press.

        The tokens before them are compressed once, and the cache then grows. The reference is the full cache.

        Args:
            model: folder or hub id.
            text: token ids.
            predicted: how many of them, the last ones, are predicted.
            compressions: presses and slots.
            dtype: of the weights.
            device: of the weights.
            threads: of torch on the CPU; None is its own choice.

        Returns:
            "qualities": for every compression its perplexity, its KL(full || compressed) in nats a token, and how often
            both rank the same token first ("agreement").
        """
        if not 0 < predicted < len(text):
            raise ValueError(f"predicted={predicted} of {len(text)} tokens: predict at least 1, and fewer")
        _check(compressions, len(text) - predicted)
        self._load(model, dtype, device, threads)

        import torch

        prompt, rest = text[:-predicted], text[-predicted:]
        real = torch.tensor(rest, device=device)
        qualities: list[dict[str, float]] = []
        with torch.no_grad():
            first, caches = self._prefill(prompt, [(FULL, len(prompt)), *compressions])
            for i, cache in enumerate(caches):
                parts = [first]
                if predicted > 1:
                    positions = torch.arange(len(prompt), len(text) - 1, device=device)[None]
                    later = self.model(real[None, :-1], past_key_values=cache, position_ids=positions)
                    parts.append(later.logits)
                found = torch.cat(parts, dim=1)[0].float().log_softmax(dim=-1)
                if i == 0:
                    full = found
                    continue
                qualities.append(
                    {
                        "perplexity": math.exp(-found.gather(1, real[:, None]).mean()),
                        "kl": float((full.exp() * (full - found)).sum(dim=-1).mean()),
                        "agreement": float((full.argmax(dim=-1) == found.argmax(dim=-1)).float().mean()),
                    }
                )
        return {"qualities": qualities}

    def prepare(
        self,
        model: str,
        prompt: list[list[int]],
        tokens: int,
        press: str,
        slots: int,
        dtype: str,
        device: str,
        threads: int | None,
    ) -> dict[str, Any]:
        """Load what `measure` runs: a press on a prompt [B, S], as kvpress' own pipeline applies it.

        Returns:
            "weights_bytes" that a step reads, and "compile_s", None since nothing is compiled.
        """
        _check([(press, slots)], len(prompt[0]))
        self._load(model, dtype, device, threads)

        import torch
        from transformers import DynamicCache

        ids = torch.tensor(prompt, device=device)
        length, cuda = ids.shape[1], ids.is_cuda

        @torch.no_grad()
        def run() -> dict[str, Any]:
            clock, cache = Clock(cuda), DynamicCache()
            clock.mark()
            with self._applied(press, slots, length):
                logits = self.model(ids, past_key_values=cache, logits_to_keep=1).logits
            new = logits[:, -1].argmax(dim=-1, keepdim=True)
            new.tolist()
            clock.mark()
            for i in range(tokens - 1):
                new = self._step(new, cache, length + i)
                new.tolist()  # a user sees every token at once
                clock.mark()
            prefill, *steps = clock.seconds()
            held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            return {"prefill_s": prefill, "steps_s": steps, "cache_bytes": held, "peak_bytes": peak_bytes(cuda)}

        self.round = run
        if cuda:
            torch.cuda.set_device(ids.device)  # of clocks and peaks
        with torch.no_grad():
            self.model(ids[:, :8])  # what is set up once at a first use
        peak_bytes(cuda, reset=True)
        return {"weights_bytes": _weight_bytes(self.model), "compile_s": None}

    def measure(self) -> dict[str, Any]:
        """Run a prompt and its reply once, and time both."""
        if self.round is None:
            raise ValueError("nothing is prepared: ask for 'prepare' first")
        return self.round()

    def _load(self, model: str, dtype: str, device: str, threads: int | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        if threads is not None:
            torch.set_num_threads(threads)
        if self.loaded != (model, dtype, device):
            self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval().to(device)
            self.loaded = (model, dtype, device)

    @contextlib.contextmanager
    def _applied(self, press: str, slots: int, length: int) -> Iterator[None]:
        if press == FULL:
            yield
        else:
            with _press(press, slots, length)(self.model):
                yield

    def _prefill(self, prompt: list[int], compressions: Compressions) -> tuple[Any, list[Any]]:
        """Run the exact prefill of a prompt once: logits of its last token [1, 1, vocab], and a cache of every press.

        Presses are called as the hook of `BasePress` calls them, each on the exact keys and values of a layer.
        """
        import torch
        from transformers import DynamicCache

        torch.manual_seed(0)  # some presses draw projections
        length = len(prompt)
        presses = [None if name == FULL else _press(name, slots, length) for name, slots in compressions]
        whole, caches = DynamicCache(), [DynamicCache() for _ in compressions]

        def compress(module: Any, _: Any, given: dict[str, Any], output: Any) -> None:
            layer = whole.layers[module.layer_idx]
            for press, cache in zip(presses, caches, strict=True):
                slots = layer.keys, layer.values
                if press is not None:
                    slots = press.compress(module, given["hidden_states"], *slots, output[1], given)
                cache.update(*slots, module.layer_idx)

        for press in presses:
            if press is not None:
                press.post_init_from_model(self.model)
        hooks = []
        try:
            for layer in self.model.model.layers:
                layer.self_attn.rotary_emb = self.model.model.rotary_emb  # presses look for it there
                hooks.append(layer.self_attn.register_forward_hook(compress, with_kwargs=True))
            ids = torch.tensor([prompt], device=self.model.device)
            logits = self.model(ids, past_key_values=whole, logits_to_keep=1).logits
        finally:
            for hook in hooks:
                hook.remove()
        for (name, slots), cache in zip(compressions, caches, strict=True):
            if name != FULL and cache.get_seq_length() != slots:
                raise ValueError(f"{name} kept {cache.get_seq_length()} slots of {length}, not {slots}")
        return logits, caches

    def _step(self, new: Any, cache: Any, position: int) -> Any:
        """Read tokens [B, S] that stand at `position` of the uncompressed text; return the next ones [B, 1]."""
        import torch

        positions = torch.arange(position, position + new.shape[1], device=new.device)[None]
        logits = self.model(new, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits
        return logits[:, -1].argmax(dim=-1, keepdim=True)


def _check(compressions: Compressions, length: int) -> None:
    if length < 1:
        raise ValueError("there is nothing to compress: pass at least one token")
    for name, slots in compressions:
        if name != FULL and name not in PRESSES:
            raise ValueError(f"press {name!r}: choose among {', '.join((FULL, *PRESSES))}")
        if name != FULL and not 0 < slots <= length:
            raise ValueError(f"slots={slots} of {length} tokens: keep at least 1, and no more than there are")


def _press(name: str, slots: int, length: int) -> Any:
    """A press that leaves so many slots: kvpress keeps int(length * (1 - ratio))."""
    import kvpress

    return PRESSES[name](kvpress, 0.0 if slots == length else 1 - (slots + 0.5) / length)


def _batched(caches: list[Any]) -> Iterator[tuple[list[int], Any]]:
    """Join caches of as many slots: which ones, and a cache with a row of each."""
    import torch
    from transformers import DynamicCache

    lengths = [cache.get_seq_length() for cache in caches]
    for length in dict.fromkeys(lengths):
        which = [i for i, each in enumerate(lengths) if each == length]
        joined = DynamicCache()
        for layers in zip(*(caches[i].layers for i in which), strict=True):
            keys, values = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("keys", "values"))
            joined.update(keys, values, len(joined.layers))
        yield which, joined


def _weight_bytes(model: Any) -> int:
    """Bytes of weights that one decode step reads; an embedding that is not tied to the head is only looked up."""
    total: int = sum(parameter.nbytes for parameter in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total if embedding is head else total - int(embedding.nbytes)


if __name__ == "__main__":
    adapter = Adapter()
    serve(
        {
            "evaluate": adapter.evaluate,
            "predict": adapter.predict,
            "prepare": adapter.prepare,
            "measure": adapter.measure,
        }
    )
