"""Export a compiled model, load it in a fresh process, and time the first token of both: python demos/export.py

The exported model is loaded without the code of the model it was made of, and has to give the same tokens. Each row of
the table is a process of its own; seconds are from its start to its first token. `--short` takes a tiny random model
and compiles nothing.
"""

import argparse
import json
import os
import pydoc_data.topics
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from transformers import LlamaConfig
from transformers.generation.streamers import BaseStreamer

import ckv_compile

START = time.perf_counter()
TINY = "a tiny random model"


class FirstToken(BaseStreamer):
    """Notes when the first token came."""

    def __init__(self) -> None:
        self.puts = 0
        self.at = 0.0

    def put(self, value: Tensor) -> None:
        """Take the prompt first, then one token at a time."""
        self.puts += 1
        if self.puts == 2:
            self.at = time.time()

    def end(self) -> None:
        """Nothing is left to do."""


def say(message: str) -> None:
    """Print one line of progress with the time since the start."""
    print(f"[{time.perf_counter() - START:5.1f} s] {message}", flush=True)


def generate(model: ckv_compile.CKVForCausalLM, task: dict[str, Any]) -> dict[str, Any]:
    """Generate, and say what came, when, and which modules of model code this process has imported."""
    clock = FirstToken()
    prompt = torch.tensor([task["prompt"]])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=task["tokens"], do_sample=False, streamer=clock
    )
    # modeling_auto holds names of models alone, which transformers wants for the help of its configs.
    model_code = [
        name.split(".")[-1] for name in sys.modules if re.match(r"transformers\.models\.(?!auto).*modeling_", name)
    ]
    return {"first": clock.at, "tokens": output[0].tolist(), "model_code": model_code}


def child(task: dict[str, Any]) -> None:
    """Make a model as the task says, generate, and print what came as the last line."""
    if "artifact" in task:
        model = ckv_compile.load(task["artifact"], compile=task["compile"])
    else:
        source, _ = original(task["source"])
        model = ckv_compile.transform(source, compile=task["compile"], **task["options"])
    print(json.dumps(generate(model, task)))


def original(source: str) -> tuple[Any, Any]:
    """Load or make a model, and its tokenizer if it has one."""
    from transformers import AutoModelForCausalLM  # here, since it imports model code

    from ckv_compile.loading import load_model

    if source != TINY:
        return load_model(source)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=128, num_hidden_layers=2, **shape)).eval(), None


def fresh(name: str, task: dict[str, Any], cache: Path | None = None) -> tuple[str, float, dict[str, Any]]:
    """Do a task in a fresh process, with its Inductor cache in a folder of its own.

    Returns:
        the name, seconds to the first token, and what the process says.
    """
    own = {"TORCHINDUCTOR_CACHE_DIR": str(cache)} if cache else {}
    command = [sys.executable, __file__, "--child", json.dumps(task)]
    started = time.time()
    done = subprocess.run(command, env={**os.environ, **own}, check=True, stdout=subprocess.PIPE, text=True)
    said = json.loads(done.stdout.splitlines()[-1])
    say(f"{name}: {said['first'] - started:.1f} s")
    return name, said["first"] - started, said


def main(arguments: list[str] | None = None) -> None:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="hub id, folder or GGUF file (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=256, help="slots to keep (default: %(default)s)")
    parser.add_argument("--length", type=int, default=300, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=80, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="a tiny random model, not compiled")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        child(json.loads(args.child))
        return
    with tempfile.TemporaryDirectory() as folder:
        run(args, Path(folder))


def run(args: argparse.Namespace, folder: Path) -> None:
    """Export to a folder, and time fresh processes with and without what is there."""
    out = folder / "artifact"
    source, options = args.model, {"budget": args.budget}
    if args.short:
        source, options = TINY, {"budget": 48, "interval": 8, "n_sink": 2, "n_recent": 8, "chunk_size": 8}
    say(f"loading {source} (the first time converts smollm2, about 20 s)")
    model, tokenizer = original(source)
    prompt = list(range(100))
    if tokenizer is not None:
        prompt = tokenizer("\n\n".join(pydoc_data.topics.topics.values())).input_ids[: args.length]
    say("exporting" + ("" if args.short else ", and compiling the decode step ahead of time (about a minute)"))
    ours = ckv_compile.transform(model, compile="eager", **options)
    ours.save_pretrained(out, tokenizer=tokenizer, aot=[] if args.short else [1])
    size = ckv_compile.artifact.describe(out)["bytes"]
    say(f"the artifact has {size / 1e6:.1f} MB; generating in fresh processes")
    task = {"source": source, "prompt": prompt, "tokens": args.tokens, "options": options}
    load = {**task, "artifact": str(out), "compile": "eager" if args.short else "aot"}
    if args.short:
        results = [("transform(), in this process", None, generate(ours, task)), fresh("load(), not compiled", load)]
    else:
        transform, cache = {**task, "compile": "inductor"}, folder / "cache"
        results = [
            fresh("transform(), nothing cached", transform, cache),
            fresh("transform(), Inductor's cache warm", transform, cache),
            fresh("load(), compiled when it was saved", load, folder / "unused"),
        ]
    rows = [
        [name, f"{seconds:.1f}" if seconds else "", ", ".join(said["model_code"]) or "none"]
        for name, seconds, said in results
    ]
    print("\n" + tabulate(rows, headers=["start", "s to the first token", "model code"], tablefmt="github"), end="\n\n")
    (_, first, expected), (_, last, found) = results[0], results[-1]
    if found["tokens"] != expected["tokens"]:
        raise SystemExit("the loaded model gives other tokens than the one it was exported from")
    share = f", the first in {last / first:.0%} of the time" if first and last else ""
    print(f"the same {len(found['tokens']) - len(prompt)} tokens{share}")


if __name__ == "__main__":
    main()
