"""A run from prompts or texts to rows of tables, written to a file while it goes on."""

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import ckv_compile
from ckv_compile.evaluation.harness import Chosen, Protocol, Reader, predict, run
from ckv_compile.evaluation.outcomes import Log, Outcome, TextOutcome, summarise, summarise_texts
from ckv_compile.evaluation.presses import Presses
from ckv_compile.evaluation.tasks import Prompt
from ckv_compile.evaluation.texts import windows

Show = Callable[[int, int], None]
"""Told the prompts or windows that are done and how many there are."""


class Session:
    """One model and the methods that are compared on it.

    Args:
        source: the name of the model, for the file.
        model: the original model, in evaluation mode.
        tokenizer: its tokenizer.
        chosen: of `harness.choose`.
        options: fields of `CKVConfig` for all methods, as far as they have such a thing.
        out: a file for the outcomes; None keeps none.
        presses: of kvpress, which take the same prompts and texts.
    """

    def __init__(
        self,
        source: str,
        model: PreTrainedModel,
        tokenizer: Any,
        chosen: Sequence[Chosen],
        options: Mapping[str, Any],
        out: Path | None,
        presses: Presses | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chosen = chosen
        self.out = out
        self.presses = presses
        self.reader = Reader(model, **options)
        shape = self.reader.shape
        self.settings = {
            "model": source,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "shape": {"kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "itemsize": shape.dtype.itemsize},
            "methods": [[each.candidate.label, each.budget] for each in chosen],
            "presses": [] if presses is None else presses.chosen,
            "options": dict(options),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "ckv_compile": ckv_compile.__version__,
        }

    def ask(self, prompts: Sequence[Prompt], protocols: Sequence[Protocol], show: Show) -> dict[str, Any]:
        """Run all prompts; return the settings, rows and outcomes.

        Raises:
            InputError: if the file holds outcomes of other settings.
            ConfigError: for a bad budget or option.
            OSError: if the file cannot be written.
        """
        settings = self.settings | {"protocols": list(protocols)}
        log, outcomes = Log(self.out, settings, _about()), []
        show(0, len(prompts))
        for done, prompt in enumerate(prompts, start=1):
            key = [prompt.task, prompt.length, prompt.depth, prompt.seed]
            found = log.outcomes(key)
            if found is None:
                replies = run(self.reader, self.tokenizer, prompt, self.chosen, protocols)
                if self.presses is not None:
                    replies += self.presses.replies(prompt, protocols)
                found = [each._asdict() for each in replies]
                log.add(key, found)
            outcomes += [Outcome(**each) for each in found]
            show(done, len(prompts))
        return _document(settings, summarise(outcomes), outcomes)

    def read(self, texts: Mapping[str, str], context: int, tokens: int, count: int, show: Show) -> dict[str, Any]:
        """Predict the last tokens of windows of texts; return the settings, rows and outcomes.

        Args:
            texts: by name.
            context: tokens of a window.
            tokens: how many of them, the last ones, are predicted.
            count: windows of each text.
            show: told what is done.

        Raises:
            InputError: if a text is too short, or the file holds outcomes of other settings.
            ConfigError: for a bad budget or option.
            OSError: if the file cannot be written.
        """
        settings = self.settings | {"context": context, "tokens": tokens, "windows": count}
        cut = {name: windows(self.tokenizer, name, text, context, count) for name, text in texts.items()}
        log, outcomes, done = Log(self.out, settings, _about()), [], 0
        show(done, count * len(cut))
        for name, ids in cut.items():
            for i, window in enumerate(ids):
                found = log.outcomes([name, i])
                if found is None:
                    where = (name, i, window.to(self.reader.device))
                    predictions = predict(self.reader, *where, tokens, self.chosen)
                    if self.presses is not None:
                        predictions += self.presses.predictions(*where, tokens)
                    found = [each._asdict() for each in predictions]
                    log.add([name, i], found)
                outcomes += [TextOutcome(**each) for each in found]
                show(done := done + 1, count * len(cut))
        return _document(settings, summarise_texts(outcomes), outcomes)


def _document(settings: Mapping[str, Any], rows: Sequence[Any], outcomes: Sequence[Any]) -> dict[str, Any]:
    return {
        "settings": settings,
        "rows": [row._asdict() for row in rows],
        "outcomes": [each._asdict() for each in outcomes],
    }


def _about() -> dict[str, Any]:
    """When and on what a run was begun."""
    return {"date": time.strftime("%Y-%m-%d"), "cpu": _cpu(), "threads": torch.get_num_threads()}


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
