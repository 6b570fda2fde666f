"""A long real prompt, a question about it, and the answer from a cache of a quarter of the size: make demo

Loads a model, answers with transformers' own caches and with clustered ones at 50 % and 25 % of the context, streams
the answers, and prints what each cost. MODEL= takes "smollm2", a hub id, a folder or a GGUF file.
"""

import argparse
import logging
import pydoc_data.topics
import statistics
import time
from itertools import pairwise
from typing import Any

import torch
import transformers
from tabulate import tabulate
from torch import Tensor
from transformers import PreTrainedModel, TextStreamer

import ckv_compile
from ckv_compile.benchmark import cache_bytes
from ckv_compile.loading import SMOLLM2, load_model

QUESTION = (
    "The text above is a part of the Python language reference. "
    "Explain in a few paragraphs what it says about the assert statement and about assignment statements."
)


class ClockedStreamer(TextStreamer):
    """Prints the answer as it comes and notes when each token came."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Take the prompt first, then one token at a time."""
        self.times.append(time.perf_counter())
        super().put(value)


def say(message: str) -> None:
    """Print one line of progress with the time since the start."""
    print(f"[{time.perf_counter() - START:5.1f} s] {message}", flush=True)


def build_prompt(tokenizer: Any, length: int) -> Tensor:
    """A chat prompt [1, >= length] that quotes the language reference in CPython and asks about it."""
    text = "\n\n".join(pydoc_data.topics.topics.values())
    quote = tokenizer.decode(tokenizer(text).input_ids[:length])
    messages = [{"role": "user", "content": f"{quote}\n\n{QUESTION}"}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return encoded["input_ids"]


def answer(model: PreTrainedModel, tokenizer: Any, prompt: Tensor, tokens: int, **options: Any) -> tuple[Any, list]:
    """Stream an answer; return the cache it ended with, and a row of (prefill s, tokens/s, cache MB)."""
    streamer = ClockedStreamer(tokenizer)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        streamer=streamer,
        return_dict_in_generate=True,
        **options,
    )
    start, *times = streamer.times
    steps = [after - before for before, after in pairwise(times)]
    cache = output.get("cache", output.get("past_key_values"))
    held = cache_bytes(cache)
    return cache, [f"{times[0] - start:.1f}", f"{1 / statistics.median(steps):.1f}", f"{held / 1e6:.0f}"]


def describe(model: ckv_compile.CKVForCausalLM, cache: ckv_compile.ClusteredCache, prompt_length: int) -> str:
    """What was merged: the rounds that ran, and how many tokens a slot stands for."""
    config, schedule = model.ckv_config, model.ckv_config.schedule
    rounds = schedule.rounds(prompt_length) if prompt_length >= config.capacity else ()
    # Slots that appeared in decode and are no longer there: each compaction takes `interval` of them.
    appended = schedule.settle(prompt_length, config.capacity) + cache.get_seq_length() - prompt_length
    in_decode = (appended - int(cache.state.fill)) // config.interval
    degree = cache.state.degree[0]
    degree = degree[degree > 0]
    bounds = [1, 2, 3, 5, 9, 17, 33]
    table = []
    for low, high in zip(bounds, [*bounds[1:], None], strict=True):
        share = ((degree >= low) & (degree < (high or float("inf")))).float().mean().item()
        span = f"{low}+" if high is None else str(low) if high == low + 1 else f"{low}-{high - 1}"
        table.append([span, f"{100 * share:.1f} %"])
    return (
        f"compactions: {len(rounds)} rounds at prefill merging {list(rounds)} slots per head, {in_decode} in decode; "
        f"tokens per row: {int(degree.sum() / (model.cache_shape.layers * model.cache_shape.kv_heads))}, "
        f"largest degree {int(degree.max())}\n"
        + tabulate(table, headers=["tokens in a slot", "slots"], tablefmt="github", disable_numparse=True)
    )


def main() -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2, help="hub id, folder or GGUF file (default: %(default)s)")
    parser.add_argument("--length", type=int, default=6000, help="tokens of text to quote (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=80, help="longest answer (default: %(default)s)")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.basicConfig(level=logging.WARNING, format="          %(message)s")
    logging.getLogger("ckv_compile").setLevel(logging.INFO)

    say(f"loading {args.model} (the first time converts it, about 20 s)")
    model, tokenizer = load_model(args.model)
    prompt = build_prompt(tokenizer, args.length)
    length = prompt.shape[1]
    rows, notes = [], []
    for name, options in (("dynamic cache (default)", {}), ("static cache", {"cache_implementation": "static"})):
        say(f"transformers, {name}: prefilling {length} tokens, then the answer")
        _, row = answer(model, tokenizer, prompt, args.tokens, **options)
        rows.append([f"transformers, {name}", *row])
    for percent in (50, 25):
        say(f"ckv_compile at {percent} %: exporting and rewriting")
        ours = ckv_compile.transform(model, budget=length * percent // 100)
        say("compiling the decode step (about 20 s the first time)")
        ours.warm_up()
        say(f"prefilling {length} tokens, then the answer")
        cache, row = answer(ours, tokenizer, prompt, args.tokens)
        rows.append([f"ckv_compile, {percent} %: {ours.ckv_config.budget} slots", *row])
        notes.append(f"{percent} %: {describe(ours, cache, length)}")
    say("done")
    print(f"\n{length} tokens of prompt, {torch.get_num_threads()} threads, {next(model.parameters()).dtype}\n")
    heads = ["cache", "prefill s", "tokens/s", "cache MB"]
    print(tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True), *notes, sep="\n\n")


START = time.perf_counter()

if __name__ == "__main__":
    main()
