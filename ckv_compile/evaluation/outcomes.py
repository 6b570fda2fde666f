"""What comes out of a run: records, the file that they are written to while it goes on, and means with intervals."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ckv_compile.errors import InputError
from ckv_compile.evaluation.methods import FULL

MEAN = "mean"
"""Stands for all tasks, or all texts, in a row."""
SAYS_SOMETHING = 0.7
"""What the full cache scores at least in a task that can tell methods apart."""

Budget = int | float
_Z = 1.959963984540054  # of a standard normal variable, 95 % lie between -z and z
# fmt: off
_T = (  # the same of Student's t, for 1, 2, ... degrees of freedom
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on


class Outcome(NamedTuple):
    """One reply."""

    task: str
    length: int
    depth: float
    seed: int
    protocol: str
    method: str  # with its options, as in "ours:r_init=0.1"
    budget: Budget | None  # as it was asked for; None for the full cache
    score: float
    reply: str


class TextOutcome(NamedTuple):
    """The predictions of one window of a text."""

    text: str
    window: int
    method: str
    budget: Budget | None
    nll: float  # mean negative log likelihood of the real tokens, nats
    kl: float  # mean divergence of the full cache's predictions, nats
    agreement: float  # share of tokens that both rank first
    kl_parts: list[float]  # of equal parts of the predicted tokens, in their order


class Row(NamedTuple):
    """The replies of one method and budget to the prompts of one task, length and protocol, or of all tasks."""

    task: str
    length: int
    protocol: str
    method: str
    budget: Budget | None
    samples: int
    score: float  # mean
    low: float  # of its 95 % interval
    high: float
    says_something: bool  # whether the full cache scores at least 70 % there


class TextRow(NamedTuple):
    """The predictions of one method and budget of one text, or of all texts."""

    text: str
    method: str
    budget: Budget | None
    windows: int
    perplexity: float
    kl: float
    low: float | None  # of its 95 % interval; None for a single window
    high: float | None
    agreement: float
    kl_parts: list[float]


class Log:
    """A file of JSON lines: the settings of a run, then a line for every prompt or window that is done.

    A run with the same settings goes on where another one ended, or was interrupted.

    Args:
        path: the file; None keeps nothing.
        settings: what decides an outcome beside its prompt.
        about: what else the first line says, such as a date.

    Raises:
        InputError: if the file holds something else, or the outcomes of other settings.
        OSError: if it cannot be read or written.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self.path = path
        self.done: dict[str, list[dict[str, Any]]] = {}
        if path is None:
            return
        if not path.exists():
            path.write_text(json.dumps({"settings": settings, "about": about}) + "\n", encoding="utf-8")
            return
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):  # the run was ended while it wrote
            lines.pop()
            path.write_text("".join(lines), encoding="utf-8")
        found = header_of(path, lines)["settings"]
        wanted = json.loads(json.dumps(settings))
        for name in {**found, **wanted}:
            if found.get(name) != wanted.get(name):
                raise InputError(
                    f"{path} holds outcomes of another run, with {name}={found.get(name)!r} and not "
                    f"{wanted.get(name)!r}: write to another file, or run with the same settings to go on"
                )
        for line in lines[1:]:
            record = json.loads(line)
            self.done[json.dumps(record["prompt"])] = record["outcomes"]

    def outcomes(self, prompt: Sequence[Any]) -> list[dict[str, Any]] | None:
        """What was written of a prompt; None if it is not done."""
        return self.done.get(json.dumps(prompt))

    def add(self, prompt: Sequence[Any], outcomes: list[dict[str, Any]]) -> None:
        """Write what came out of a prompt."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"prompt": prompt, "outcomes": outcomes}, ensure_ascii=False) + "\n")


def header_of(path: Path, lines: Sequence[str]) -> dict[str, Any]:
    """The first line of a file that `Log` wrote.

    Raises:
        InputError: if it is none.
    """
    try:
        header = json.loads(lines[0])
        return {"settings": header["settings"], "about": header["about"]}
    except (IndexError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} does not begin with the settings of a run: write to another file") from error


def summarise(outcomes: Iterable[Outcome]) -> list[Row]:
    """Mean scores with their intervals: first over all tasks that say something, then of each, in their order.

    The interval of a task is Wilson's. That of the mean over tasks combines those of the tasks, each side by its
    squares (Zou and Donner, 2008), so that it says how far other prompts of the same tasks may be.
    """
    scores: dict[tuple[str, int, str, str, Budget | None], list[float]] = defaultdict(list)
    for each in outcomes:
        scores[each.task, each.length, each.protocol, each.method, each.budget].append(each.score)
    rows = []
    by_cell: dict[tuple[int, str, str, Budget | None], list[Row]] = defaultdict(list)
    for key, found in scores.items():
        task, length, protocol, method, budget = key
        reference = scores[task, length, protocol, FULL, None]
        says_something = sum(reference) >= SAYS_SOMETHING * len(reference)
        rows.append(Row(*key, len(found), statistics.fmean(found), *wilson(found), says_something))
        if says_something:
            by_cell[length, protocol, method, budget].append(rows[-1])
    means = []
    for (length, protocol, method, budget), tasks in by_cell.items():
        mean = statistics.fmean(each.score for each in tasks)
        below = math.hypot(*(each.score - each.low for each in tasks)) / len(tasks)
        above = math.hypot(*(each.high - each.score for each in tasks)) / len(tasks)
        samples = sum(each.samples for each in tasks)
        means.append(Row(MEAN, length, protocol, method, budget, samples, mean, mean - below, mean + above, True))
    return [*means, *rows]


def summarise_texts(outcomes: Iterable[TextOutcome]) -> list[TextRow]:
    """Means over the windows of each text, then over all texts, in the order of the outcomes.

    The interval of a divergence is Student's, over the windows of a text; that over all texts is normal, of a mean of
    the texts' means.
    """
    windows: dict[tuple[str, str, Budget | None], list[TextOutcome]] = defaultdict(list)
    for each in outcomes:
        windows[each.text, each.method, each.budget].append(each)
    by_cell: dict[tuple[str, Budget | None], list[list[TextOutcome]]] = defaultdict(list)
    rows = []
    for (text, method, budget), found in windows.items():
        by_cell[method, budget].append(found)
        mean, half = student([each.kl for each in found])
        rows.append(_text_row(text, method, budget, found, mean, half))
    for (method, budget), texts in by_cell.items():
        if len({text for text, *_ in windows}) > 1:
            mean, half = mean_of_means([[each.kl for each in found] for found in texts])
            rows.append(_text_row(MEAN, method, budget, [each for found in texts for each in found], mean, half))
    return rows


def _text_row(
    text: str, method: str, budget: Budget | None, found: Sequence[TextOutcome], kl: float, half: float
) -> TextRow:
    return TextRow(
        text=text,
        method=method,
        budget=budget,
        windows=len(found),
        perplexity=math.exp(statistics.fmean(each.nll for each in found)),
        kl=kl,
        low=kl - half if half < math.inf else None,
        high=kl + half if half < math.inf else None,
        agreement=statistics.fmean(each.agreement for each in found),
        kl_parts=[statistics.fmean(part) for part in zip(*(each.kl_parts for each in found), strict=True)],
    )


def wilson(scores: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean of scores from 0 to 1 (Wilson, 1927).

    It is that of a share of successes. A score between 0 and 1 varies less than one that is either, so that for tasks
    with several answers it is a little too wide.
    """
    n, mean = len(scores), sum(scores) / len(scores)
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def student(values: Sequence[float]) -> tuple[float, float]:
    """The mean of some values, and half of its 95 % interval by Student's t; without an end for a single one."""
    n = len(values)
    if n == 1:
        return values[0], math.inf
    return statistics.fmean(values), (_T[n - 2] if n - 2 < len(_T) else _Z) * statistics.stdev(values) / math.sqrt(n)


def mean_of_means(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean of the means of groups, and half of its 95 % interval, by the variance inside each; see `student`."""
    if min(map(len, groups)) == 1:
        return statistics.fmean(map(statistics.fmean, groups)), math.inf
    variance = sum(statistics.variance(group) / len(group) for group in groups) / len(groups) ** 2
    return statistics.fmean(map(statistics.fmean, groups)), _Z * math.sqrt(variance)


def difference(one: Mapping[Any, float], other: Mapping[Any, float]) -> tuple[float, float]:
    """The mean difference of two methods on the prompts that both have, and half of its 95 % interval."""
    pairs: Iterator[tuple[float, float]] = ((value, other[key]) for key, value in one.items() if key in other)
    return student([a - b for a, b in pairs])
