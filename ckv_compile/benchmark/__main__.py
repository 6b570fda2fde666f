"""The tables on the command line: python -m ckv_compile.benchmark"""

import argparse
import json
from pathlib import Path

import torch

from ckv_compile.benchmark import tables
from ckv_compile.benchmark.tables import LLAMA_8B, TABLES, report, run
from ckv_compile.errors import CKVError
from ckv_compile.loading import SMOLLM2
from ckv_compile.roofline import GPUS


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, run, print the tables, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=tables.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"hub id, folder or GGUF file (default: {SMOLLM2})")
    parser.add_argument("--context", type=int, default=8000, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=2048, help="slots per KV head (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each method (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--only", choices=TABLES, help="run one of the tables")
    parser.add_argument(
        "--roofline",
        nargs="+",
        choices=sorted(GPUS),
        metavar="GPU",
        help=f"print the floors of a decode step on these GPUs ({', '.join(sorted(GPUS))}) and run nothing; --model is "
        f"then a hub id, a folder, or {LLAMA_8B}, the default",
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768, 131072], help="of the roofline")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="of the roofline")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args(arguments)
    try:
        result = run(
            args.model,
            args.context,
            args.budget,
            args.tokens,
            args.rounds,
            args.threads,
            args.dtypes,
            args.only,
            args.roofline or (),
            args.contexts,
            args.batches,
        )
    except CKVError as error:
        raise SystemExit(str(error)) from error
    print(report(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
