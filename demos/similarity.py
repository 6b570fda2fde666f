"""How alike the keys of a text are, and how that changes with their distance: make demo-similarity

The method rests on two observations: keys that stand near each other are alike, and their cosine falls with distance,
monotonically and convexly. This runs the untouched model on real text, reads the keys of its cache, draws both as PNG
files, and prints in numbers how far they hold.

The keys are those that the method matches, as they are cached: after RoPE, one KV head at a time. RoPE alone turns the
keys of equal tokens apart as their distance grows, so keys before RoPE are shown beside them, where the model makes
them in modules of their own (`k_norm` or `k_proj`).
"""

import argparse
import inspect
import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # draws to files; no window is needed

import torch
import torch.nn.functional as F
import transformers
from matplotlib import pyplot as plt
from tabulate import tabulate
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ckv_compile.evaluation import text_of
from ckv_compile.loading import SMOLLM2, load_model

DISTANCES = (1, 2, 8, 32, 128)
SHOWN_TOKENS = 256  # of a heat map: more would be less than a pixel each


class Shares(NamedTuple):
    """Shares of the (layer, head) pairs whose mean cosine does what the observations say."""

    falls: float  # from each of DISTANCES to the next
    convex: float  # so, and each time less steeply
    falls_always: float  # from each distance to the next, up to the last of DISTANCES
    falling_steps: float  # not of pairs but of those steps


@torch.no_grad()
def read_keys(model: PreTrainedModel, ids: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Run a prompt [1, S] and return the keys of each layer [Hkv, S, D]: as cached, and before RoPE.

    The second list is empty if the model has no module that makes the keys of a layer alone.
    """
    makers = [module for name, module in model.named_modules() if name.endswith(".k_norm")]
    makers = makers or [module for name, module in model.named_modules() if name.endswith(".k_proj")]
    made: list[Tensor] = []
    hooks = [maker.register_forward_hook(lambda _module, _inputs, output: made.append(output)) for maker in makers]
    cache = DynamicCache()  # without a config, so that sliding windows keep all their tokens too
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    try:
        model(ids, use_cache=True, logits_to_keep=1, **{name: cache})
    finally:
        for hook in hooks:
            hook.remove()
    cached = [layer.keys[0].float() for layer in cache.layers]
    if len(made) != len(cached):
        return cached, []
    # [1, S, Hkv * D], or [1, S, Hkv, D] or [1, Hkv, S, D] from a norm: told apart by the shape in the cache.
    before = []
    for keys, output in zip(cached, made, strict=True):
        heads, tokens, dim = keys.shape
        by_head = output.shape[1:] == (heads, tokens, dim)
        before.append(output[0].float() if by_head else output.reshape(tokens, heads, dim).transpose(0, 1).float())
    return cached, before


def mean_cosines(keys: Tensor) -> Tensor:
    """Mean cosine [Hkv, S] of the keys [Hkv, S, D] of two tokens, by their distance from 0 to S - 1.

    The sum over all pairs of a distance is an autocorrelation, which two Fourier transforms compute for all distances.
    """
    tokens = keys.shape[1]
    unit = F.normalize(keys.double(), dim=-1)
    spectrum = torch.fft.rfft(unit, n=2 * tokens, dim=1)
    sums = torch.fft.irfft(spectrum.abs().square().sum(dim=-1), n=2 * tokens, dim=1)[:, :tokens]
    return sums / torch.arange(tokens, 0, -1)


def shares(cosines: Tensor) -> Shares:
    """How many of the (layer, head) pairs [L, Hkv, S] have a mean cosine that falls, and falls convexly."""
    slopes = cosines[..., list(DISTANCES)].diff(dim=-1) / torch.tensor([b - a for a, b in pairwise(DISTANCES)])
    steps = cosines[..., 1 : DISTANCES[-1] + 1].diff(dim=-1) < 0
    falls = (slopes < 0).all(dim=-1)
    convex = falls & (slopes.diff(dim=-1) > 0).all(dim=-1)
    return Shares(*(test.double().mean().item() for test in (falls, convex, steps.all(dim=-1), steps)))


def report(name: str, cosines: Tensor) -> str:
    """A row for each layer with its mean cosine at each distance, and the shares."""
    by_layer = cosines.mean(dim=1)[:, list(DISTANCES)]  # [L, distances]
    rows = [[layer, *row] for layer, row in enumerate(by_layer.tolist())]
    rows.append(["all", *by_layer.mean(dim=0).tolist()])
    found = shares(cosines)
    last = DISTANCES[-1]
    return (
        f"keys {name}: mean cosine by layer and distance\n\n"
        + tabulate(rows, headers=["layer", *map(str, DISTANCES)], tablefmt="github", floatfmt=".3f")
        + f"\n\nof {cosines.shape[0] * cosines.shape[1]} pairs of layer and head, the mean cosine\n"
        f"  falls from each of these distances to the next: {found.falls:.1%}\n"
        f"  and each time less steeply (convex):            {found.convex:.1%}\n"
        f"  falls at every single step from 1 to {last}:       {found.falls_always:.1%}\n"
        f"  of all those steps, {found.falling_steps:.1%} go down"
    )


def numbers(cosines: Tensor) -> dict[str, Any]:
    """What `report` says, for a file: means by distance, of all and of each layer, and the shares."""
    by_layer = cosines.mean(dim=1)[:, list(DISTANCES)]
    return {
        "mean": by_layer.mean(dim=0).tolist(),
        "layers": by_layer.tolist(),
        "shares": shares(cosines)._asdict(),
    }


def draw_heat_maps(named: dict[str, list[Tensor]], path: Path) -> None:
    """Cosines between the first tokens, head 0 of the first, a middle and the last layer, one row for each name."""
    layers = len(next(iter(named.values())))
    columns = sorted({0, layers // 2, layers - 1})
    size = (4.2 * len(columns), 4.2 * len(named))
    figure, axes = plt.subplots(len(named), len(columns), figsize=size, squeeze=False, layout="constrained")
    for row, (name, keys) in zip(axes, named.items(), strict=True):
        for axis, layer in zip(row, columns, strict=True):
            unit = F.normalize(keys[layer][0, :SHOWN_TOKENS], dim=-1)
            image = axis.imshow(unit @ unit.T, vmin=0, vmax=1, cmap="magma", interpolation="nearest")
            axis.set(title=f"layer {layer}, head 0, {name}", xlabel="token", ylabel="token")
    figure.colorbar(image, ax=axes, shrink=0.6, extend="min", label="cosine of keys")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_decay(named: dict[str, Tensor], path: Path) -> None:
    """Mean cosine against distance, one line a layer, one plot for each name."""
    figure, axes = plt.subplots(
        1, len(named), figsize=(6 * len(named), 4.5), squeeze=False, sharey=True, layout="constrained"
    )
    colours = matplotlib.colormaps["viridis"]
    for axis, (name, cosines) in zip(axes[0], named.items(), strict=True):
        layers, _, tokens = cosines.shape
        longest = max(DISTANCES[-1] + 1, tokens // 2)  # beyond half of the text, few pairs are left
        for layer, line in enumerate(cosines.mean(dim=1)):
            axis.plot(range(1, longest), line[1:longest], color=colours(layer / max(1, layers - 1)), linewidth=1)
        axis.set(xscale="log", xlabel="distance in tokens", title=f"keys {name}")
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("mean cosine, all heads of a layer")
    scale = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, layers - 1), colours)
    figure.colorbar(scale, ax=axes, label="layer")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, run the model, print the numbers, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2, help="hub id, folder or GGUF file (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of text (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the pictures (default: %(default)s)")
    args = parser.parse_args(arguments)
    if args.tokens <= 2 * DISTANCES[-1]:
        parser.error(f"--tokens {args.tokens}: means at distance {DISTANCES[-1]} need more than {2 * DISTANCES[-1]}")
    transformers.logging.set_verbosity_error()

    model, tokenizer = load_model(args.model)
    cached, before = read_keys(model, text_of(tokenizer, args.tokens))
    keys = {"as cached": cached} | ({"before RoPE": before} if before else {})
    cosines = {name: torch.stack([mean_cosines(layer) for layer in layers]) for name, layers in keys.items()}
    print(f"{args.model}, {args.tokens} tokens of CPython's language reference\n")
    print(*(report(name, each) for name, each in cosines.items()), sep="\n\n")
    if not before:
        print("\nthis model has no k_norm or k_proj of its own in every layer: keys before RoPE are not shown")
    if args.json:
        found = {"model": args.model, "tokens": args.tokens, "distances": DISTANCES}
        found["keys"] = {name: numbers(each) for name, each in cosines.items()}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    args.out.mkdir(parents=True, exist_ok=True)
    heat_map, decay = (args.out / f"similarity-{name}.png" for name in ("heat-map", "distance"))
    draw_heat_maps(keys, heat_map)
    draw_decay(cosines, decay)
    print(f"\n{heat_map}\n{decay}")


if __name__ == "__main__":
    main()
