"""Serving with and without the plugin, with the same bytes for the KV cache: python -m ckv_compile.vllm.bench

All requests arrive at once: prompts of one length, cut from the text that Python's own documentation is, and replies of
one length, greedy and past any end. Each engine runs in a process of its own, with vLLM's defaults but for what the
command line says, and is warmed up first.
"""

import argparse
import json
import os
import pydoc_data.topics
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ckv_compile.benchmark.timing import machine_name
from ckv_compile.config import CKVConfig
from ckv_compile.errors import CKVError
from ckv_compile.loading import SMOLLM2, load_tokenizer, path_of

STOCK, OURS = "vLLM", "vLLM with ckv_compile"
_COLUMNS = {
    "requests": "requests",
    "engine": "cache",
    "states": "fit",
    "running": "running, mean",
    "steps": "engine steps",
    "preemptions": "preemptions",
    "seconds": "seconds",
    "cpu_seconds": "CPU seconds",
    "tokens_per_s": "new tokens/s",
    "first_token_s": "first token, s (median)",
    "token_ms": "ms a token (median)",
}


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Serve requests with one engine, and time them.

    Args:
        job: what `main` puts together: the model, the requests, the memory, and "ckv", the options of a clustered
            cache or None.

    Returns:
        The row of a table.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that steps can be counted
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    length, tokens, count = job["prompt"], job["tokens"], job["requests"]
    llm = LLM(
        model=str(path_of(job["model"])),
        dtype=job["dtype"],
        max_model_len=length + tokens,
        max_num_seqs=count,
        kv_cache_memory_bytes=job["memory"],
        enforce_eager=job["eager"],
        **({"enable_chunked_prefill": False, "max_num_batched_tokens": 2 * (length + tokens)} if job["whole"] else {}),
        enable_prefix_caching=False,  # no two prompts begin alike
        seed=0,
        **({} if job["ckv"] is None else {"additional_config": {"ckv": job["ckv"]}, **job["backend"]}),
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    text = load_tokenizer(job["model"])("\n".join(pydoc_data.topics.topics.values()))["input_ids"]
    if len(text) < (count + 2) * length:
        text *= (count + 2) * length // len(text) + 1

    def begin(name: str, start: int, new: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        engine.add_request(name, TokensPrompt(prompt_token_ids=text[start : start + length]), params)

    for i in range(2):
        begin(f"warm-up {i}", i * length, 4)
    while engine.has_unfinished_requests():
        engine.step()

    first: dict[str, float] = {}
    last: dict[str, float] = {}
    running: list[int] = []
    preemptions = 0
    requests = [str(i) for i in range(count)]
    for i, name in enumerate(requests):
        begin(name, (i + 2) * length, tokens)
    origin, spent = time.perf_counter(), time.process_time()
    while engine.has_unfinished_requests():
        before = {request.request_id: request.num_preemptions for request in scheduler.requests.values()}
        outputs = engine.step()
        now = time.perf_counter() - origin
        running.append(len(outputs) if not scheduler.running else max(len(outputs), len(scheduler.running)))
        preemptions += sum(
            request.num_preemptions - before.get(request.request_id, 0) for request in scheduler.requests.values()
        )
        for output in outputs:
            first.setdefault(output.request_id, now)
            last[output.request_id] = now
    seconds, spent = time.perf_counter() - origin, time.process_time() - spent
    blocks = engine.vllm_config.cache_config.num_gpu_blocks
    return {
        "requests": count,
        "engine": STOCK if job["ckv"] is None else OURS,
        "states": blocks - 1 if job["ckv"] is not None else blocks * scheduler.block_size // (length + tokens),
        "running": statistics.mean(running),
        "steps": len(running),
        "preemptions": preemptions,
        "seconds": seconds,
        "cpu_seconds": spent,
        "tokens_per_s": count * tokens / seconds,
        "first_token_s": statistics.median(first[name] for name in requests),
        "token_ms": statistics.median((last[name] - first[name]) / (tokens - 1) * 1e3 for name in requests),
    }


def report(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    from tabulate import tabulate

    shown = [{title: row[name] for name, title in _COLUMNS.items()} for row in rows]
    return tabulate(shown, headers="keys", tablefmt="github", floatfmt=".4g")


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, serve with both engines, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2, help="hub id or folder (default: %(default)s)")
    parser.add_argument("--requests", type=int, nargs="+", default=[24, 64], help="at once (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a reply (default: %(default)s)")
    parser.add_argument("--memory", type=int, default=256, help="MiB of the KV cache (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and cache (default: %(default)s)")
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--whole", action="store_true", help="no step cuts a prompt: enable_chunked_prefill=False")
    parser.add_argument("--backend", help="attention backend of the clustered cache: CUSTOM, where there is a GPU")
    parser.add_argument(
        "--ckv", type=json.loads, default={"budget": 512}, help="options of the cache (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)  # of the process of one engine
    args = parser.parse_args(arguments)
    if args.job is not None:
        print(json.dumps(serve(args.job)))
        return
    try:
        CKVConfig.from_options(args.ckv)
    except CKVError as error:
        raise SystemExit(str(error)) from error
    job = {
        "model": args.model,
        "prompt": args.prompt,
        "tokens": args.tokens,
        "memory": args.memory * 2**20,
        "dtype": args.dtype,
        "eager": args.eager,
        "whole": args.whole,
        "backend": {} if args.backend is None else {"attention_backend": args.backend},
    }
    rows = []
    for count in args.requests:
        for ckv in (None, args.ckv):
            one = json.dumps({**job, "requests": count, "ckv": ckv})
            run = subprocess.run(
                [sys.executable, "-m", "ckv_compile.vllm.bench", "--job", one], stdout=subprocess.PIPE, text=True
            )
            if run.returncode:
                raise SystemExit(f"an engine ended with code {run.returncode}")
            rows.append(json.loads(run.stdout.splitlines()[-1]))
            print(report(rows[-1:]), flush=True)
    print(report(rows))
    if args.json:
        machine = {"machine": machine_name(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        args.json.write_text(json.dumps({**job, "ckv": args.ckv, **machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
