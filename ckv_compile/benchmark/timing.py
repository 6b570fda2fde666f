"""One run of generate() and what it takes; and how fast the memory is that a step reads."""

import platform
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from ckv_compile.cache import ClusteredCache, cache_of
from ckv_compile.peers.serving import Clock

BANDWIDTH_BYTES = 512 * 2**20


class Timing(NamedTuple):
    """One run of generate()."""

    prefill: float  # seconds to the first token
    steps: list[float]  # seconds from token to token
    cache_bytes: int


class _Marks(BaseStreamer):  # type: ignore[misc]
    """Notes the time of the prompt and of every token."""

    def __init__(self, cuda: bool) -> None:
        self.clock = Clock(cuda)

    def put(self, value: Tensor) -> None:
        self.clock.mark()

    def end(self) -> None:
        pass


def time_generate(model: PreTrainedModel, prompt: Tensor, tokens: int, **options: Any) -> Timing:
    """Generate exactly `tokens` tokens greedily after `prompt` [B, S] and time each, by events on a CUDA device."""
    marks = _Marks(prompt.is_cuda)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        eos_token_id=None,
        do_sample=False,
        return_dict_in_generate=True,
        streamer=marks,
        **options,
    )
    prefill, *steps = marks.clock.seconds()
    return Timing(prefill, steps, cache_bytes(cache_of(output)))


def cache_bytes(cache: Cache) -> int:
    """Bytes of keys and values (and degrees) that a cache holds."""
    if isinstance(cache, ClusteredCache):
        return cache.nbytes()
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum(tensor.nbytes for tensor in tensors)


class Memory:
    """Samples of the bytes per second at which a device reads its memory: a sum over 512 MiB, on all threads.

    Machines shared with others swing by a factor of two, so samples are taken beside every run that is compared.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._data = torch.randn(BANDWIDTH_BYTES // 4, device=device)
        if self._data.is_cuda:
            torch.cuda.set_device(self._data.device)  # of clocks
        self._samples: list[float] = []

    def sample(self) -> None:
        """Take three more samples."""
        for _ in range(3):
            clock = Clock(self._data.is_cuda)
            clock.mark()
            self._data.sum()
            clock.mark()
            (seconds,) = clock.seconds()
            self._samples.append(self._data.nbytes / seconds)

    def bandwidth(self) -> float:
        """Median of the samples, bytes per second."""
        return statistics.median(self._samples)


def machine_name(device: str = "cpu") -> str:
    """What the machine, or a CUDA device of it, calls itself."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
