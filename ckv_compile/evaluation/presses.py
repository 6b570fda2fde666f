"""The presses of NVIDIA's kvpress on the same prompts and texts, in an environment of their own (`make peers`).

kvpress counts what is removed; here, as everywhere, a budget is what is kept.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ckv_compile.errors import PeerError
from ckv_compile.evaluation.harness import Protocol, Said
from ckv_compile.evaluation.outcomes import Budget, Outcome, TextOutcome
from ckv_compile.evaluation.tasks import Prompt
from ckv_compile.loading import path_of
from ckv_compile.peers import NOT_INSTALLED, Worker, command_of
from ckv_compile.plan import slots_of

PREFIX = "kvpress:"
"""Before the name of a press, where it stands among methods."""


class Presses:
    """A process of kvpress that answers for one model.

    Args:
        source: of the model, which transformers 5.2 must be able to load.
        model: the same model here, whose dtype and device it takes.
        tokenizer: its tokenizer.
        names: of `kvpress_adapter.PRESSES`.
        budgets: slots, or shares of the tokens, that are kept.

    Raises:
        PeerError: if kvpress is not installed.
    """

    def __init__(
        self, source: str, model: PreTrainedModel, tokenizer: Any, names: Sequence[str], budgets: Sequence[Budget]
    ) -> None:
        command = command_of("kvpress")
        if command is None:
            raise PeerError(f"kvpress is {NOT_INSTALLED}")
        self.model = model
        self.tokenizer = tokenizer
        self.chosen = [(name, budget) for name in names for budget in budgets]
        self._common = {
            "model": str(path_of(source)),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "threads": torch.get_num_threads(),
        }
        self._worker = Worker(command)

    def replies(self, prompt: Prompt, protocols: Sequence[Protocol]) -> Iterator[Outcome]:
        """The replies of all presses to one prompt.

        Raises:
            PeerError: if kvpress fails, with its reason.
        """
        sample = prompt.sample
        said = Said(self.tokenizer, self.model, sample)
        compressions = self._compressions(len(sample.context) + len(sample.question))
        for protocol in protocols:
            answer = self._worker.ask(
                "evaluate",
                context=sample.context,
                question=sample.question,
                tokens=sample.reply,
                protocol=protocol,
                compressions=compressions,
                **self._common,
            )
            for (name, budget), tokens in zip(self.chosen, answer["replies"], strict=True):
                reply = said.text(tokens)
                yield Outcome(
                    *(prompt.task, prompt.length, prompt.depth, prompt.seed, protocol, PREFIX + name, budget),
                    score=sample.metric(sample.answers, reply),
                    reply=reply,
                )

    def predictions(self, name: str, window: int, text: Tensor, predicted: int) -> Iterator[TextOutcome]:
        """What all presses make of the last tokens of a window [1, S] of a text.

        Raises:
            PeerError: if kvpress fails, with its reason.
        """
        answer = self._worker.ask(
            "predict",
            text=text[0].tolist(),
            predicted=predicted,
            compressions=self._compressions(text.shape[1]),
            **self._common,
        )
        for (press, budget), quality in zip(self.chosen, answer["qualities"], strict=True):
            yield TextOutcome(
                *(name, window, PREFIX + press, budget),
                nll=math.log(quality["perplexity"]),
                kl=quality["kl"],
                agreement=quality["agreement"],
                kl_parts=[],
            )

    def _compressions(self, length: int) -> list[tuple[str, int]]:
        return [(name, slots_of(budget, length)) for name, budget in self.chosen]
