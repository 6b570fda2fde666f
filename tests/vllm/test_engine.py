"""The plugin in engines of vLLM: against vLLM's own cache, and against `ckv_compile.transform`."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, tiny_model
from engines import LONGEST, Tokens, engine, generate, greedy, random_prompts
from vllm import LLM, SamplingParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

import ckv_compile
from ckv_compile import loading, plan
from ckv_compile.vllm.backend import StateAttention

LENGTHS = (5, 40, 130, 300, 1, 77)
NEW = 60
ROOMY = {"budget": LONGEST, "interval": 16}  # holds every token of a request
SMALL = {"budget": 64, "interval": 16, "n_recent": 8, "chunk_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", head_dim=32, num_key_value_heads=2, max_position_embeddings=LONGEST).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def prompts() -> list[Tokens]:
    return random_prompts(*LENGTHS, vocabulary=VOCABULARY)


@pytest.fixture(autouse=True)
def _release() -> Iterator[None]:
    yield
    gc.collect()  # an engine holds its memory until it is collected


@pytest.fixture(scope="module")
def stock(folder: str, prompts: list[Tokens]) -> list[Tokens]:
    tokens = generate(engine(folder), prompts, greedy(NEW))
    assert all(len(set(each)) > 10 for each in tokens), "a model that repeats itself would hide mistakes"
    return tokens


def transformed(folder: str, prompts: list[Tokens], **options: Any) -> list[Tokens]:
    model = loading.load_weights(folder, torch.float32)
    ours = ckv_compile.transform(model, compile="eager", max_context=LONGEST, **options)
    replies = []
    for prompt in prompts:
        whole = ours.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        replies.append(whole[0, len(prompt) :].tolist())
    return replies


def attentions(llm: LLM) -> list[list[tuple[str, int]]]:
    """The attention of each layer in each process, and its KV heads."""

    def of_worker(worker: Any) -> list[tuple[str, int]]:
        layers = worker.model_runner.compilation_config.static_forward_context.values()
        return [(type(layer.impl).__name__, layer.impl.num_kv_heads) for layer in layers]

    return llm.collective_rpc(of_worker)


def test_it_is_inert_unless_asked_for(folder: str) -> None:
    for _ in range(2):
        assert attentions(engine(folder, SMALL)) == [[(StateAttention.__name__, 2)] * 3]
        assert attentions(engine(folder)) == [[(CPUAttentionBackendImpl.__name__, 2)] * 3]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 64}, {"enforce_eager": False}],
    ids=["whole-prompts", "chunked", "compiled"],
)
def test_a_budget_for_all_tokens_gives_the_tokens_of_vllm(
    folder: str, prompts: list[Tokens], stock: list[Tokens], options: dict[str, Any]
) -> None:
    assert generate(engine(folder, ROOMY, **options), prompts, greedy(NEW)) == stock


def test_preempted_requests_begin_again(folder: str, prompts: list[Tokens], stock: list[Tokens]) -> None:
    llm, preemptions = engine(folder, ROOMY, max_num_batched_tokens=64), []

    def preempt(step: int) -> None:
        if step in (2, 9, 20, 33):
            preemptions.append(llm.llm_engine.reset_prefix_cache(reset_running_requests=True))

    assert generate(llm, prompts, greedy(NEW), preempt) == stock
    assert preemptions == [True] * 4


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        (SMALL, ()),
        # With the prompts named here `transform` itself has other tokens in float32 than in float64, or on another
        # machine: two merges, or two slots, are worth the same.
        (SMALL | {"exact": 0.0}, (1,)),
        (SMALL | {"cache_dtype": "int8"}, ()),
        (SMALL | {"budget": 96, "light_layers": [0, 2], "light_share": 0.6}, (2,)),
    ],
    ids=["exact", "centroids", "int8", "light-layers"],
)
def test_requests_together_have_the_tokens_of_each_alone_and_of_transform(
    folder: str, prompts: list[Tokens], stock: list[Tokens], options: dict[str, Any], tied: tuple[int, ...]
) -> None:
    llm = engine(folder, options)
    together = generate(llm, prompts, greedy(NEW))
    assert together == [generate(llm, [prompt], greedy(NEW))[0] for prompt in prompts]
    expected = transformed(folder, prompts, **options)
    for number, tokens in enumerate(together):
        assert tokens == expected[number] or number in tied
    assert together != stock, "something was merged"


def test_without_chunks_a_prompt_is_read_whole_whatever_runs_beside_it(folder: str, prompts: list[Tokens]) -> None:
    """All prompts together are more tokens than a step takes."""
    whole = engine(folder, SMALL, enable_chunked_prefill=False, max_num_batched_tokens=LONGEST)
    assert sum(map(len, prompts)) > LONGEST
    assert generate(whole, prompts, greedy(NEW)) == transformed(folder, prompts, **SMALL)


def test_chunks_of_a_prompt_are_those_of_transform(folder: str, prompts: list[Tokens]) -> None:
    llm = engine(folder, SMALL, max_num_batched_tokens=64)
    alone = [generate(llm, [prompt], greedy(NEW))[0] for prompt in prompts]
    assert alone == transformed(folder, prompts, **SMALL, prefill_chunk=64)


def test_more_requests_than_states_wait_for_one(folder: str, prompts: list[Tokens]) -> None:
    few = engine(folder, SMALL, num_gpu_blocks_override=3)  # one of which is nobody's
    many = engine(folder, SMALL)
    assert generate(few, prompts, greedy(NEW)) == generate(many, prompts, greedy(NEW))


def test_nothing_of_what_a_block_held_is_read(folder: str, prompts: list[Tokens]) -> None:
    llm = engine(folder, SMALL)
    expected = generate(llm, prompts, greedy(NEW))

    def spoil(worker: Any) -> None:
        layer, *_ = worker.model_runner.compilation_config.static_forward_context.values()
        torch.empty(0).set_(layer.kv_cache.untyped_storage()).fill_(float("nan"))

    llm.collective_rpc(spoil)
    assert generate(llm, prompts, greedy(NEW)) == expected


def test_a_prompt_preempted_in_the_middle_is_as_one_that_was_not(folder: str, prompts: list[Tokens]) -> None:
    llm = engine(folder, SMALL, max_num_batched_tokens=64)
    long = [prompts[3]]

    def preempt(step: int) -> None:
        if step == 2:
            assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    assert generate(llm, long, greedy(NEW), preempt) == generate(llm, long, greedy(NEW))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 7},
        {"temperature": 1.0, "min_p": 0.05, "seed": 3, "repetition_penalty": 1.3},
        {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {5: 3.0}},
        {"temperature": 0.0, "stop_token_ids": list(range(40, 60)), "min_tokens": 4},
    ],
    ids=["top-k-top-p", "min-p-repetition", "penalties-bias", "stop-tokens"],
)
def test_sampling_is_that_of_vllm(folder: str, prompts: list[Tokens], params: dict[str, Any]) -> None:
    asked = SamplingParams(max_tokens=NEW, ignore_eos=True, detokenize=False, **params)
    assert generate(engine(folder, ROOMY), prompts, asked) == generate(engine(folder), prompts, asked)


def test_log_probabilities_are_those_of_vllm(folder: str, prompts: list[Tokens]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, ignore_eos=True, detokenize=False)
    found = []
    for llm in (engine(folder), engine(folder, ROOMY)):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        steps = [step for output in outputs for step in output.outputs[0].logprobs]
        found.append([{token: value.logprob for token, value in step.items()} for step in steps])
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_two_processes_have_the_tokens_of_one(
    folder: str, prompts: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor parallelism: one of the two KV heads of every layer in each process."""
    alone = generate(engine(folder, SMALL), prompts, greedy(NEW))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    two = engine(folder, SMALL, distributed_executor_backend="mp", tensor_parallel_size=2)
    assert attentions(two) == [[(StateAttention.__name__, 1)] * 3] * 2
    assert generate(two, prompts, greedy(NEW)) == alone


def test_as_many_states_fit_as_ckv_plan_says(folder: str) -> None:
    memory = 3_000_000
    footprint = plan.measure(loading.load_config(folder), torch.float32)
    row = plan.Plan(SMALL["budget"], SMALL["interval"]).row_bytes(footprint, LONGEST)
    llm = engine(folder, SMALL, kv_cache_memory_bytes=memory)
    assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == memory // row
