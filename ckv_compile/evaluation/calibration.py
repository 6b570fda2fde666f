"""Which layers lose least by a small cache: `CKVConfig.light_layers` of a model.

Each layer is compressed alone, all others keep every token, and the loss is the KL divergence of the next tokens of a
text from those with the full cache. Layers differ by two orders of magnitude in it, so the half that loses least can
give some of its slots to the others.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ckv_compile.errors import InputError
from ckv_compile.evaluation.candidates import candidate
from ckv_compile.evaluation.harness import Reader, choose, predict
from ckv_compile.evaluation.methods import FULL, OURS

_AT_ONCE = 8  # layers, each of which takes a cache


class Loss(NamedTuple):
    """What one layer loses."""

    layer: int  # of the model
    kl: float  # nats a token, mean over windows


def losses(
    reader: Reader,
    windows: Mapping[str, list[Tensor]],
    predicted: int,
    share: float,
    show: Callable[[int, int], None],
) -> list[Loss]:
    """Measure what each layer without a sliding window loses if it alone keeps a share of the tokens.

    Args:
        reader: of the model.
        windows: of texts, by name, [1, S] int64 each; all but the last tokens are the beginning that is compressed.
        predicted: tokens to predict.
        share: slots of the layer that is measured, as a share of the tokens of a window, in (0, 1).
        show: told the windows and layers that are done and how many there are.

    Raises:
        InputError: if the model has fewer than two layers to choose among.
        ConfigError: for a share that leaves too few slots.
    """
    layers = reader.clustered_layers
    if len(layers) < 2:
        raise InputError(f"this model has {len(layers)} layers without a sliding window: there is nothing to choose")
    kl: dict[int, list[float]] = {layer: [] for layer in layers}
    cut = [(name, i, text) for name, texts in windows.items() for i, text in enumerate(texts)]
    for done, (name, i, text) in enumerate(cut):
        for start in range(0, len(layers), _AT_ONCE):
            show(done * len(layers) + start, len(cut) * len(layers))
            some = layers[start : start + _AT_ONCE]
            # With a budget of all tokens every other layer keeps them all.
            labels = [f"{OURS}:light_layers={layer},light_share={share}" for layer in some]
            chosen = choose([candidate(label) for label in labels], [text.shape[1]])
            found = [each for each in predict(reader, name, i, text, predicted, chosen) if each.method != FULL]
            for layer, outcome in zip(some, found, strict=True):
                kl[layer].append(outcome.kl)
    show(len(cut) * len(layers), len(cut) * len(layers))
    return [Loss(layer, sum(found) / len(found)) for layer, found in kl.items()]


def lightest(found: list[Loss]) -> tuple[int, ...]:
    """The half of the layers that loses least, in order."""
    ranked = sorted(found, key=lambda loss: (loss.kl, loss.layer))
    return tuple(sorted(loss.layer for loss in ranked[: len(found) // 2]))


def ranges(layers: tuple[int, ...]) -> str:
    """Layers in order as a command takes them: 0-4,10."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] == layer - 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def document(model: str, found: list[Loss], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a command prints."""
    light = lightest(found)
    return {
        "model": model,
        **settings,
        "losses": [loss._asdict() for loss in found],
        "light_layers": list(light),
        "option": ranges(light),
    }
