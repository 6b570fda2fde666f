"""Engines of vLLM on the CPU, in this process, for a tiny random model."""

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

LONGEST = 512
Tokens = list[int]


def engine(model: str, ckv: dict[str, Any] | None = None, **options: Any) -> LLM:
    """An engine for the model of a folder; with a clustered cache if `ckv` has the options of one."""
    asked = {} if ckv is None else {"additional_config": {"ckv": ckv}}
    defaults = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": LONGEST,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 2**26,
        "seed": 0,
    }
    return LLM(model=model, **{**defaults, **asked, **options})


def random_prompts(*lengths: int, vocabulary: int) -> list[Tokens]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(2, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def generate(
    llm: LLM,
    prompts: Sequence[Tokens],
    params: SamplingParams,
    at_step: Callable[[int], None] = lambda step: None,
) -> list[Tokens]:
    """The tokens that follow each of the prompts, which arrive together; `at_step` is called ahead of every step."""
    served, done, step = llm.llm_engine, {}, 0
    for name, prompt in enumerate(prompts):
        served.add_request(str(name), TokensPrompt(prompt_token_ids=prompt), params)
    while served.has_unfinished_requests():
        at_step(step)
        step += 1
        done |= {int(out.request_id): list(out.outputs[0].token_ids) for out in served.step() if out.finished}
    return [done[name] for name in range(len(prompts))]
