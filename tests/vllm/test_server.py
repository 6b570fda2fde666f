"""`vllm serve` with the plugin, asked over HTTP by OpenAI's client; and the benchmark of serving."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from conftest import tiny_model
from engines import engine
from vllm import SamplingParams

from ckv_compile.loading import SMOLLM2, load_tokenizer
from ckv_compile.vllm import bench

SMALL = {"budget": 64, "interval": 16}
LONGEST = 512
TEXT = "The cache of a language model grows with every token that it reads. " * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tokenizer = load_tokenizer(SMOLLM2)
    shape = {"head_dim": 32, "num_key_value_heads": 2, "max_position_embeddings": LONGEST}
    tiny_model("llama", vocab_size=len(tokenizer), **shape).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def client(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # What `vllm serve` starts, which the distribution of the CPU build cannot: it looks for one named vllm.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--served-model-name", "tiny"]
    command += ["--attention-backend", "CUSTOM", "--additional-config", '{"ckv": {"budget": 64, "interval": 16}}']
    command += ["--dtype", "float32", "--max-model-len", str(LONGEST), "--max-num-seqs", "4", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(2**26), "--host", "127.0.0.1", "--port", str(port), "--seed", "0"]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    printed = tmp_path_factory.mktemp("server") / "log"
    with printed.open("w") as file:
        server = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            for _ in range(600):
                assert server.poll() is None, printed.read_text()[-5000:]
                try:
                    client.models.list()
                    break
                except openai.APIConnectionError:
                    time.sleep(0.5)
            yield client
        finally:
            server.terminate()
            server.wait(60)


def test_a_completion_is_that_of_the_engine_in_one_piece_or_many(client: openai.OpenAI, folder: str) -> None:
    asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 40, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(**asked)
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True) if chunk.choices]
    assert len(pieces) > 5
    assert "".join(pieces) == whole.choices[0].text
    assert whole.usage.completion_tokens == 40
    assert whole.usage.prompt_tokens > SMALL["budget"] + SMALL["interval"], "the prompt was compressed"

    llm = engine(folder, SMALL, skip_tokenizer_init=False)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    assert llm.generate([TEXT], params, use_tqdm=False)[0].outputs[0].text == whole.choices[0].text


def test_a_stop_string_ends_a_reply(client: openai.OpenAI) -> None:
    asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 60, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(**asked).choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    ended = client.completions.create(**asked, stop=[stop]).choices[0]
    assert ended.finish_reason == "stop"
    assert ended.text == text[: text.index(stop)]


def test_a_chat_with_sampling_repeats_with_its_seed(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": TEXT}]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0.9, "top_p": 0.9}
    first, again, other = (
        [choice.message.content for choice in client.chat.completions.create(**asked, seed=seed, n=2).choices]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first[0] != first[1]
    assert first != other


def test_the_benchmark_serves_with_both_caches(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    file = tmp_path / "rows.json"
    command = ["--model", folder, "--requests", "6", "--prompt", "200", "--tokens", "30", "--memory", "1"]
    command += ["--dtype", "float32", "--eager", "--whole", "--ckv", json.dumps(SMALL), "--json", str(file)]
    bench.main(command)
    stock, ours = json.loads(file.read_text())["rows"]
    assert (stock["engine"], ours["engine"]) == (bench.STOCK, bench.OURS)
    assert ours["states"] > stock["states"] > 0
    assert ours["running"] > stock["running"]
    assert ours["steps"] < stock["steps"]
    assert ours["preemptions"] == 0
    assert bench.report([stock, ours]) in capsys.readouterr().out


def test_the_benchmark_refuses_bad_options_at_once() -> None:
    with pytest.raises(SystemExit, match="did you mean 'budget'"):
        bench.main(["--ckv", '{"budgt": 64}'])
