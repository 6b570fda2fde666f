"""What clustering costs over the length of a prompt: python -m ckv_compile.evaluation.cost --json FILE

Chunked soft matching, the same matching of all pairs (one chunk of the whole prompt), and K-means bring the same keys
to three quarters of their slots. A line through the logarithms of times and lengths has as its slope the power of the
length that the time grows with.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from ckv_compile.evaluation.methods import KMEANS_ITERATIONS, Layer, kmeans, ours
from ckv_compile.schedule import Schedule

LENGTHS = (512, 1024, 2048, 4096)
KEPT = 0.75
HEADS, DIM = 3, 64  # of a layer of SmolLM2-135M
CHUNK = 128


def measure(lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """Time one layer with each method at each length, in turn.

    Returns:
        For each method the median seconds at each length, and the slope and the constant of the line through them,
        seconds = constant * length ** slope.
    """
    methods: dict[str, Callable[[Layer, int], object]] = {
        f"chunked soft matching, chunks of {CHUNK}": lambda layer, kept: ours(layer, [_plan(kept, CHUNK)]),
        "all pairs": lambda layer, kept: ours(layer, [_plan(kept, 2 * layer.k.shape[1])]),
        f"K-means, {KMEANS_ITERATIONS} iterations": lambda layer, kept: kmeans(layer, [_plan(kept, CHUNK)]),
    }
    layers = {length: _layer(length) for length in lengths}
    seconds: dict[tuple[str, int], list[float]] = {(name, length): [] for name in methods for length in lengths}
    for round_ in range(rounds + 1):
        for length, layer in layers.items():
            for name, run in methods.items():
                start = time.perf_counter()
                run(layer, round(KEPT * length))
                if round_:  # the first one warms up
                    seconds[name, length].append(time.perf_counter() - start)
    rows = []
    for name in methods:
        medians = [statistics.median(seconds[name, length]) for length in lengths]
        line = statistics.linear_regression([math.log(n) for n in lengths], [math.log(each) for each in medians])
        rows.append({"method": name, "seconds": medians, "slope": line.slope, "constant": math.exp(line.intercept)})
    return {
        "lengths": list(lengths),
        "rounds": rounds,
        "kept": KEPT,
        "threads": torch.get_num_threads(),
        "rows": rows,
    }


def _plan(budget: int, chunk_size: int) -> Schedule:
    """One round that merges half of set A, a quarter of the slots."""
    return Schedule(budget, n_sink=0, n_recent=0, chunk_size=chunk_size, r_init=1.0, r_decay=0.0, r_min=1.0)


def _layer(tokens: int) -> Layer:
    """Keys whose neighbours are alike, as in a text."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(HEADS, tokens, DIM, generator=generator) for _ in range(3))
    return Layer(q, k.cumsum(dim=1) / torch.arange(1, tokens + 1).sqrt()[:, None], v, DIM**-0.5, 0.0, None)


def report(result: dict[str, Any]) -> str:
    """The result as a table."""
    heads = ["method", *(f"{length:,}: ms" for length in result["lengths"]), "slope"]
    rows = [
        [row["method"], *(f"{1e3 * each:.2f}" for each in row["seconds"]), f"{row['slope']:.2f}"]
        for row in result["rows"]
    ]
    return tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a prompt, two or more")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each method (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args(arguments)
    result = measure(args.lengths, args.rounds)
    print(report(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
