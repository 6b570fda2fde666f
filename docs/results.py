"""The page docs/results.md, from the outcomes under docs/results/.

    python docs/results.py --write docs/results.md

The page says what was measured and by which command; every number on it is computed here from those files, which are:

    *.jsonl           outcomes of tasks and texts: ckv eval ... --out FILE; NAME.PEER.jsonl goes into the tables of
                      NAME.jsonl, and what ablations*.jsonl has is shown by the choices that it tests
    small_model.jsonl python demos/small_model.py --out FILE
    speed*.json       ckv bench MODEL --save FILE; its --plots are shown if they are named NAME-*.png
    serving*.json     python -m ckv_compile.vllm.bench --json FILE
    cost.json         python -m ckv_compile.evaluation.cost --json FILE
    layers.json       ckv calibrate MODEL --json > FILE
    similarity.json   python demos/similarity.py --json FILE
"""

import argparse
import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from ckv_compile.benchmark.contestants import DYNAMIC
from ckv_compile.evaluation.ablations import ABLATIONS
from ckv_compile.evaluation.methods import FULL, OURS
from ckv_compile.evaluation.outcomes import (
    MEAN,
    Outcome,
    Row,
    TextOutcome,
    TextRow,
    difference,
    header_of,
    summarise,
    summarise_texts,
)
from ckv_compile.render import CONTEST_HEADS, contest_tables, contestant
from ckv_compile.vllm.bench import report

FOLDER = Path(__file__).parent / "results"
PLOT = "quality.png"
SEMANTIC = ("needle", "needle-essay", "multi-key", "variables")
"""Tasks of the kinds on which the paper finds its method strongest: S-NIAH-1 and 2, MK-NIAH-1, VT."""
SINGLE = ("needle", "needle-essay", "multi-key")
"""Tasks that ask for one thing, at one depth."""
TRAINED = ("records",)
"""Tasks of small models that were trained on them, by demos/small_model.py: they are none of RULER's."""
PAPER = f"{OURS}:exact=0.0,r_init=0.25"
"""The paper's own method: centroids alone, made by gentle rounds."""
LIGHT = re.compile(r"light_layers=[-+\d]+(,light_share=[.\d]+)?,?")
PARTITIONS = ("csm", "csm-contiguous", "csm-random")

NEAR = 0.05
"""How far below the best is near it."""

Budget = int | float | None


class File(NamedTuple):
    """A file of outcomes, or several of the same prompts."""

    name: str
    settings: dict[str, Any]
    about: dict[str, Any]
    tasks: list[Outcome]
    texts: list[TextOutcome]


class Claim(NamedTuple):
    """What the paper says, and what was found here."""

    paper: str
    verdict: str  # reproduced, not reproduced, undecided, not measured, or not testable here
    found: str


def read(folder: Path) -> tuple[list[File], dict[str, Any]]:
    """Read the outcomes of a folder, and its other numbers by the names of their files."""
    files = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        header = header_of(path, lines)
        found = [each for line in lines[1:] for each in json.loads(line)["outcomes"]]
        files.append(
            File(
                path.name,
                header["settings"],
                header["about"],
                [Outcome(**each) for each in found if "task" in each],
                [TextOutcome(**each) for each in found if "text" in each],
            )
        )
    return files, {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def joined(files: Sequence[File]) -> list[File]:
    """Put files of the same prompts together, by their names until the first dot."""
    runs: dict[str, File] = {}
    for file in files:
        name = file.name.partition(".")[0]
        first = runs.get(name, file._replace(name=name, tasks=[], texts=[]))
        runs[name] = first._replace(tasks=first.tasks + file.tasks, texts=first.texts + file.texts)
    return list(runs.values())


def page(folder: Path = FOLDER) -> str:
    """The text of docs/results.md."""
    files, numbers = read(folder)
    every = joined(files)
    runs = [run for run in every if not _is_ablation(run)]
    blocks = [
        "# Results",
        "Made by `python docs/results.py --write docs/results.md` from the files in `docs/results`; nothing here "
        "is typed by hand. A budget is what is *kept*. Intervals are 95 %. [The guide](guide.md) says how to measure a "
        "model of yours.",
        "## What was run",
        _table(["file", "model", "of what", "prompts or windows", "date", "hardware", "versions"], _runs(files)),
        "## The paper's claims",
        "CentroidKV (arXiv 2506.11418) reports results of 7B and 8B models on GPUs; a claim is reproduced here if the "
        f"small model of the table above shows it too. The paper's method is `{PAPER}` in the tables; `{OURS}` is the "
        "default, whose exact slots are not in the paper.",
        *_legend(files),
        _table(["claim", "here", "found"], [list(claim) for claim in claims(every, numbers)]),
        "## Ours against the best other method",
        "Of each cell, ours against the method that is best there, chosen after the fact; with light layers, which are "
        "ours, also against the best other one that was given the same ones. A score is a mean over tasks (more is "
        "better), KL one over texts (less is better); differences are on equal prompts or windows.",
        _table(["what", "kept", "method", "", "best other", "", "difference"], _duels(runs)),
    ]
    if runs:
        blocks += [f"![Quality against budget](results/{PLOT})"]
    for file in runs:
        blocks += [f"## {_title(file)}", *(_tasks(file) if file.tasks else _texts(file))]
    if len(runs) < len(every):
        blocks += ["## Ablations", *_ablations([run for run in every if _is_ablation(run)])]
    for name, found in numbers.items():
        if name.startswith("speed"):
            pictures = sorted(path.name for path in folder.glob(f"{name}-*.png"))
            blocks += [f"## Speed and memory: {name}", *_speed(found)]
            blocks += [f"![{picture.removesuffix('.png')}](results/{picture})" for picture in pictures]
        if name.startswith("serving"):
            blocks += [f"## With vLLM: {name}", *_serving(found)]
    if "layers" in numbers:
        blocks += ["## What layers lose", *_layers(numbers["layers"])]
    if "similarity" in numbers:
        blocks += ["## Similarity of keys", *_similarity(numbers["similarity"])]
    if "cost" in numbers:
        blocks += ["## Cost of clustering", *_cost(numbers["cost"])]
    return "\n\n".join(blocks) + "\n"


def _title(file: File) -> str:
    return f"{'Tasks' if file.tasks else 'Texts'}: {file.name}"


def _runs(files: Sequence[File]) -> Iterator[list[str]]:
    for file in files:
        settings, about = file.settings, file.about
        if file.tasks:
            prompts = {(each.task, each.length, each.depth, each.seed) for each in file.tasks}
            seeds = [each.seed for each in file.tasks]
            what = f"tasks of {', '.join(map(_length, sorted({each.length for each in file.tasks})))}, seeds "
            what += f"{min(seeds)} to {max(seeds)}"
        else:
            prompts = {(each.text, each.window) for each in file.texts}
            what = f"the last {settings['tokens']:,} of {settings['context']:,} tokens"
        yield [
            f"[{file.name}](results/{file.name})",
            f"{settings['model']}, {settings['dtype']}",
            what,
            f"{len(prompts):,}",
            about["date"],
            f"{about['cpu']}, {about['threads']} threads",
            f"torch {settings['torch']}, transformers {settings['transformers']}, Python {settings['python']}",
        ]


def _tasks(file: File) -> Iterator[str]:
    rows = summarise(file.tasks)
    tasks = [*dict.fromkeys(row.task for row in rows if row.task != MEAN)]
    for length, protocol in dict.fromkeys((row.length, row.protocol) for row in rows):
        own = [row for row in rows if (row.length, row.protocol) == (length, protocol)]
        yield f"### {_length(length)}, question {protocol}"
        silent = [row.task for row in own if row.method == FULL and not row.says_something]
        if silent:
            yield f"Not in the mean, since the full cache is below 70 % there: {', '.join(silent)}."
        cells = {(row.method, row.budget, row.task): row for row in own}
        table = [
            [
                _name(method),
                _kept(budget),
                *(_score(cells.get((method, budget, task)), task) for task in (MEAN, *tasks)),
            ]
            for method, budget in dict.fromkeys((row.method, row.budget) for row in own)
        ]
        yield _table(["method", "kept", "mean", *tasks], table)
    yield from _depths(file)


def _depths(file: File) -> Iterator[str]:
    """Scores by where a single needle stands, of all lengths and both protocols."""
    found: dict[tuple[str, Budget], list[list[float]]] = {}
    for each in file.tasks:
        if each.task in SINGLE:
            thirds = found.setdefault((each.method, each.budget), [[], [], []])
            thirds[min(2, int(3 * each.depth))].append(each.score)
    if all(third for thirds in found.values() for third in thirds) and found:
        yield "### By depth"
        yield f"Where the needle stands, of {', '.join(SINGLE)}, all lengths and protocols together."
        table = [
            [_name(method), _kept(budget), *(f"{statistics.fmean(third):.2f}" for third in thirds)]
            for (method, budget), thirds in found.items()
        ]
        yield _table(["method", "kept", "first third", "second", "last"], table)


def _score(row: Row | None, task: str) -> str:
    if row is None:
        return "-"
    return f"**{row.score:.2f}** ({row.low:.2f} - {row.high:.2f})" if task == MEAN else f"{row.score:.2f}"


def _texts(file: File) -> Iterator[str]:
    rows = summarise_texts(file.texts)
    texts = [*dict.fromkeys(row.text for row in rows)]
    cells = {(row.method, row.budget, row.text): row for row in rows}
    yield "KL to the full cache, in nats a token, and the perplexity of the real tokens."
    table = [
        [_name(method), _kept(budget), *(_kl(cells[method, budget, text]) for text in texts)]
        for method, budget in dict.fromkeys((row.method, row.budget) for row in rows)
    ]
    yield _table(["method", "kept", *("all texts" if text == MEAN else text for text in texts)], table)
    long = [row for row in rows if row.text == texts[-1] and "interval=" in row.method]
    if long:
        parts = range(1, len(long[0].kl_parts) + 1)
        yield f"KL as the predictions go on, in {len(parts)} equal parts, for {_text_name(texts[-1])}:"
        table = [[_name(row.method), _kept(row.budget), *(f"{part:.3f}" for part in row.kl_parts)] for row in long]
        yield _table(["method", "kept", *map(str, parts)], table)


def _is_ablation(file: File) -> bool:
    return file.name.startswith("ablations")


def _ablations(files: Sequence[File]) -> Iterator[str]:
    yield (
        "One choice changed at a time, on the seeds and texts for tuning: nothing here is in the tables above. The "
        "differences are to the first row of a table, on equal prompts or windows; a KL is better if less, a score if "
        "more. What the paper chooses is tested without exact slots, which leave centroids little to do."
    )
    measures = [measure for file in files for measure in _measures(file)]
    for name, methods in ABLATIONS.items():
        shown = [(head, values) for head, values in measures if len(values.keys() & {*methods}) > 1]
        if shown:
            yield f"### {name}"
            firsts = [next(values[method] for method in methods if method in values) for _, values in shown]
            table = [
                [
                    method,
                    *(_beside(values.get(method), first) for (_, values), first in zip(shown, firsts, strict=True)),
                ]
                for method in methods
                if any(method in values for _, values in shown)
            ]
            yield _table(["", *(head for head, _ in shown)], table)


def _measures(file: File) -> Iterator[tuple[str, dict[str, dict[Any, float]]]]:
    """What was measured of each budget: the values of every method by their prompts, or windows."""
    found: dict[str, dict[str, dict[Any, float]]] = {}
    for each in file.tasks:
        cell = found.setdefault(f"score {each.protocol}, {_kept(each.budget)}", {}).setdefault(each.method, {})
        cell[each.task, each.length, each.depth, each.seed] = each.score
    for window in file.texts:
        head = f"KL over {file.settings['tokens']:,} tokens, {_kept(window.budget)}"
        cell = found.setdefault(head, {}).setdefault(window.method, {})
        cell[window.text, window.window] = window.kl
    yield from found.items()


def _beside(values: dict[Any, float] | None, first: dict[Any, float]) -> str:
    """A mean, and how far it is from the first one."""
    if values is None:
        return "-"
    mean = f"{statistics.fmean(values.values()):.3f}"
    if values is first:
        return mean
    more, half = difference(values, first)
    return f"{mean} ({more:+.3f} ± {half:.3f})"


def _speed(found: dict[str, Any]) -> Iterator[str]:
    machine = found["machine"]
    yield (
        f"`ckv bench`: {found['model']}, {found['dtype']}, {machine['name']}, {machine['threads']} threads, torch "
        f"{machine['torch']}, transformers {machine['transformers']}, {machine['date']}. {found['tokens']} tokens, "
        f"{found['rounds']} rounds in turn, medians with the range of the prefills and the quartiles of the tokens. "
        '"floor" is what reading weights and cache once takes, at the bandwidth measured in the run.'
    )
    for title, rows in contest_tables(found):
        yield f"### {title}"
        yield _table(CONTEST_HEADS, rows)
    for row in found["rows"]:
        if row["failed"]:
            yield f"{contestant(row)}, context {row['context']:,}, batch {row['batch']}: {row['failed']}"


def _serving(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"`python -m ckv_compile.vllm.bench`: {found['model']}, {found['dtype']}, {found['machine']}, "
        f"{found['threads']} threads, torch {found['torch']}, {'eager' if found['eager'] else 'compiled'}"
        f"{', prompts whole' if found['whole'] else ''}. Prompts of {found['prompt']:,} tokens, replies of "
        f"{found['tokens']:,}, {found['memory'] // 2**20:,} MiB of KV cache; ours with "
        f"`{json.dumps(found['ckv'])}`. All requests arrive at once."
    )
    yield report(found["rows"])


def _name(method: str) -> str:
    """A method without the numbers of its light layers, which `_legend` has."""
    return LIGHT.sub("", method).rstrip(":") + (" + light layers" if LIGHT.search(method) else "")


def _legend(files: Sequence[File]) -> Iterator[str]:
    """What stands for the light layers of methods."""
    methods = [each.method for file in files for each in (*file.tasks, *file.texts)]
    for found in dict.fromkeys(match[0].rstrip(",") for method in methods if (match := LIGHT.search(method))):
        yield (
            f'"+ light layers" stands for `{found}`: the half of the layers that loses least gets that share of the '
            "slots, and the others more, for the same bytes. They were measured on the texts for tuning."
        )


def _text_name(text: str) -> str:
    return "all texts" if text == MEAN else text


def _kl(row: TextRow) -> str:
    around = "" if row.high is None else f" ± {row.high - row.kl:.3f}"
    return f"{max(0.0, row.kl):.3f}{around}, ppl {row.perplexity:.2f}"


def _similarity(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['model']}, {found['tokens']:,} tokens. Mean cosine of two keys by their distance, of all heads:"
    table = [[name, *(f"{each:.3f}" for each in keys["mean"])] for name, keys in found["keys"].items()]
    yield _table(["keys", *map(str, found["distances"])], table)
    table = [[name, *(f"{each:.1%}" for each in keys["shares"].values())] for name, keys in found["keys"].items()]
    yield _table(["keys", *next(iter(found["keys"].values()))["shares"]], table)


def _layers(found: dict[str, Any]) -> Iterator[str]:
    total, light = sum(loss["kl"] for loss in found["losses"]) or 1.0, set(found["light_layers"])
    shares = {loss["layer"]: loss["kl"] / total for loss in found["losses"]}
    worst = max(shares, key=shares.__getitem__)
    yield (
        f"{found['model']}: KL to the full cache where one layer alone keeps {found['share'] * found['context']:.0f} "
        f"of {found['context'] - found['tokens']:,} tokens, over the next {found['tokens']}, "
        f"{found['windows']} windows of each of {', '.join(found['texts'])}. Layer {worst} makes "
        f"{shares[worst]:.0%} of the sum, and the {len(light)} layers that lose least (bold) "
        f"{sum(shares[layer] for layer in light):.1%}."
    )
    rows = [[f"**{layer}**" if layer in light else str(layer), f"{share:.1%}"] for layer, share in shares.items()]
    columns = 3
    height = -(-len(rows) // columns)
    table = [[cell for row in rows[i::height] for cell in row] for i in range(height)]
    yield _table(["layer", "of the sum"] * columns, table)


def _cost(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"Milliseconds to bring the keys of one layer to {found['kept']:.0%}, medians of {found['rounds']} rounds in "
        f"turn on {found['threads']} threads, and the line seconds = constant x length ^ slope through them."
    )
    table = [
        [
            row["method"],
            *(f"{1e3 * each:.2f}" for each in row["seconds"]),
            f"{row['slope']:.2f}",
            f"{row['constant']:.1e}",
        ]
        for row in found["rows"]
    ]
    yield _table(["method", *(f"{length:,}" for length in found["lengths"]), "slope", "constant"], table)


def claims(files: Sequence[File], numbers: dict[str, Any]) -> Iterator[Claim]:
    """The paper's claims, each beside what was measured."""
    yield _memory(files)
    yield _faster(numbers)
    yield _serves_faster(numbers)
    yield _best_on_tasks(files, f"best or near best (within {NEAR}) on RULER at 25 % to 75 %", None)
    yield _best_on_tasks(files, "especially on S-NIAH-1, S-NIAH-2, MK-NIAH-1 and VT", SEMANTIC)
    yield Claim(
        "best on LongBench's question answering and summaries", "not testable here", "a model of 135M parameters cannot"
    )
    yield _weak_on_strings(files)
    yield _alternating(files)
    yield _near(numbers)
    yield _decay(numbers)
    yield _linear(numbers)


def _unmeasured(paper: str) -> Claim:
    return Claim(paper, "not measured", "-")


def _memory(files: Sequence[File]) -> Claim:
    paper = "the cache takes up to 75 % less memory"
    shapes = [file.settings["shape"] for file in files]
    if not shapes:
        return _unmeasured(paper)
    shape = min(shapes, key=lambda each: each["head_dim"] * each["itemsize"])  # where a degree weighs most
    token = 2 * shape["head_dim"] * shape["itemsize"]
    saved = 1 - 0.25 * (token + 4) / token  # a slot has a degree of 4 bytes beside key and value
    return Claim(paper, "reproduced", f"{saved:.1%} at a budget of 25 %, degrees included")


def _faster(numbers: dict[str, Any]) -> Claim:
    """Of a step: ours against the full cache that transformers takes by default, where it gains most."""
    best = (0.0, "nothing was measured on the CPU")
    for name, document in numbers.items():
        rows = [row for row in document["rows"] if not row["failed"]] if name.startswith("speed") else []
        for full in (row for row in rows if row["kind"] == DYNAMIC):
            cell = (full["context"], full["batch"])
            for mine in (row for row in rows if row["kind"] == OURS and (row["context"], row["batch"]) == cell):
                ratio = full["step_s"]["median"] / mine["step_s"]["median"]
                where = f"{cell[0]:,} tokens, {cell[1]} row{'s' * (cell[1] > 1)}, {document['dtype']}"
                kept = f"{_kept(mine['kept'])} kept"
                best = max(
                    best, (ratio, f"on the CPU at most {ratio:.1f} times transformers' default ({where}, {kept})")
                )
    return Claim("decoding is up to 1.92 times as fast", "not testable here", f"it needs a GPU; {best[1]}")


def _serves_faster(numbers: dict[str, Any]) -> Claim:
    best = (0.0, "nothing was measured on the CPU")
    for document in (found for name, found in numbers.items() if name.startswith("serving")):
        for requests in dict.fromkeys(row["requests"] for row in document["rows"]):
            stock, mine = (row["seconds"] for row in document["rows"] if row["requests"] == requests)
            where = f"{requests} requests, replies of {document['tokens']:,}, the same bytes"
            words = f"on the CPU at most {stock / mine:.1f} times ({where})"
            best = max(best, (stock / mine, words))
    return Claim("serving in vLLM is up to 4 times as fast", "not testable here", f"it needs a GPU; {best[1]}")


class Duel(NamedTuple):
    """A method in a cell, and the best other one there."""

    mine: Row
    best: Row
    gain: float  # in score
    half: float  # of its interval


def _is_ours(method: str) -> bool:
    """Whether this is what we would have people use: the default, with light layers or without."""
    return method == OURS or (method.startswith(OURS) and bool(LIGHT.search(method)))


def _is_other(method: str, light: bool = False) -> bool:
    """Whether nothing of a method is ours, or nothing but its light layers."""
    return not method.startswith((OURS, "csm")) and bool(LIGHT.search(method)) == light


def _duels_on_tasks(outcomes: Sequence[Outcome], method: str, light: bool = False) -> Iterator[Duel]:
    """A method against the best one that is not ours, of each length, protocol and budget, on the same prompts."""
    means = [row for row in summarise(outcomes) if row.task == MEAN]
    for mine in (row for row in means if row.method == method):
        cell = (mine.length, mine.protocol, mine.budget)
        others = [
            row for row in means if (row.length, row.protocol, row.budget) == cell and _is_other(row.method, light)
        ]
        if others:
            best = max(others, key=lambda row: row.score)
            yield Duel(mine, best, *difference(*(_by_prompt(outcomes, name, cell) for name in (method, best.method))))


def _duels(files: Sequence[File]) -> Iterator[list[str]]:
    for file in files:
        methods = dict.fromkeys(each.method for each in (*file.tasks, *file.texts) if _is_ours(each.method))
        pairs = [(own, light) for own in methods for light in (False, True) if LIGHT.search(own) or not light]
        for mine, best, gain, half in (each for pair in pairs for each in _duels_on_tasks(file.tasks, *pair)):
            yield [
                f"score, {_trained(file)}{_length(mine.length)}, question {mine.protocol}",
                *(_kept(mine.budget), _name(mine.method), f"{mine.score:.2f}"),
                *(_name(best.method), f"{best.score:.2f}"),
                f"{gain:+.2f} ± {half:.2f}",
            ]
        rows = summarise_texts(file.texts)
        last = [row for row in rows if row.text == rows[-1].text]
        for mine_text, light in ((row, light) for own, light in pairs for row in last if row.method == own):
            others = [row for row in last if row.budget == mine_text.budget and _is_other(row.method, light)]
            if others:
                least = min(others, key=lambda row: row.kl)
                kls = [
                    {
                        (each.text, each.window): each.kl
                        for each in file.texts
                        if (each.method, each.budget) == (row.method, row.budget)
                    }
                    for row in (mine_text, least)
                ]
                more, half = difference(*kls)
                yield [
                    f"KL, {_text_name(mine_text.text)}",
                    *(_kept(mine_text.budget), _name(mine_text.method), f"{mine_text.kl:.3f}"),
                    *(_name(least.method), f"{least.kl:.3f}"),
                    f"{more:+.3f} ± {half:.3f}",
                ]


def _best_on_tasks(files: Sequence[File], paper: str, only: Sequence[str] | None) -> Claim:
    """The paper's method against the best other one of each file, budget and protocol."""
    found, differences = [], []
    for file in files:
        outcomes = [each for each in file.tasks if (each.task not in TRAINED if only is None else each.task in only)]
        for mine, best, gain, half in _duels_on_tasks(outcomes, PAPER):
            differences.append((gain + NEAR, half))
            found.append(
                f"{_kept(mine.budget)}, {_length(mine.length)}, {mine.protocol}: {mine.score:.2f}, "
                f"{gain:+.2f} ± {half:.2f} to {best.method}"
            )
    if not found:
        return _unmeasured(paper)
    return Claim(paper, _verdict(differences), "; ".join(found))


def _verdict(differences: Sequence[tuple[float, float]]) -> str:
    """What differences, each with half of its interval, say of a claim that all of them are positive."""
    if any(mean + half < 0 for mean, half in differences):
        return "not reproduced"
    return "reproduced" if all(mean - half > 0 for mean, half in differences) else "undecided: too few samples"


def _by_prompt(outcomes: Sequence[Outcome], method: str, cell: tuple[int, str, Budget]) -> dict[Any, float]:
    """The scores of a method by their prompts."""
    return {
        (each.task, each.depth, each.seed): each.score
        for each in outcomes
        if each.method == method and (each.length, each.protocol, each.budget) == cell
    }


def _weak_on_strings(files: Sequence[File]) -> Claim:
    paper = "weak where random strings such as UUIDs must match exactly"
    found, lost = [], []
    for file in files:
        own = [each for each in file.tasks if each.task == "uuid"]
        cells = dict.fromkeys((each.length, each.protocol, each.budget) for each in own if each.method == PAPER)
        for length, protocol, budget in cells:
            whole = _by_prompt(own, FULL, (length, protocol, None))
            mean, half = difference(whole, _by_prompt(own, PAPER, (length, protocol, budget)))
            lost.append((mean, half))
            found.append(f"{_kept(budget)}, {_length(length)}, {protocol}: {-mean:+.2f} ± {half:.2f} to the full cache")
    return Claim(paper, _verdict(lost), "; ".join(found)) if found else _unmeasured(paper)


def _alternating(files: Sequence[File]) -> Claim:
    paper = "alternating is the best partition of a chunk"
    found, differences = [], []
    for head, values in (measure for file in files for measure in _measures(file)):
        for other in (each for each in PARTITIONS[1:] if {each, PARTITIONS[0]} <= values.keys()):
            more, half = difference(values[other], values[PARTITIONS[0]])
            differences.append((more if head.startswith("KL") else -more, half))
            found.append(f"{head}: {other.removeprefix('csm-')} {more:+.3f} ± {half:.3f}")
    return Claim(paper, _verdict(differences), "; ".join(found)) if found else _unmeasured(paper)


def _near(numbers: dict[str, Any]) -> Claim:
    paper = "keys near each other are alike"
    if "similarity" not in numbers:
        return _unmeasured(paper)
    found = numbers["similarity"]
    near, far = (found["keys"]["as cached"]["mean"][i] for i in (0, -1))
    text = f"mean cosine {near:.2f} at distance {found['distances'][0]}, {far:.2f} at {found['distances'][-1]}"
    return Claim(paper, "reproduced" if near > far else "not reproduced", text)


def _decay(numbers: dict[str, Any]) -> Claim:
    paper = "their cosine falls with the distance, monotonically and convexly"
    if "similarity" not in numbers:
        return _unmeasured(paper)
    shares = numbers["similarity"]["keys"]["as cached"]["shares"]
    text = f"falls in {shares['falls']:.0%} of the heads, convexly in {shares['convex']:.0%}"
    return Claim(paper, "reproduced" if shares["convex"] > 0.5 else "not reproduced", text)


def _linear(numbers: dict[str, Any]) -> Claim:
    paper = "chunked soft matching costs O(n c d), less than K-means and all pairs"
    if "cost" not in numbers:
        return _unmeasured(paper)
    mine, *others = numbers["cost"]["rows"]
    least = all(mine["seconds"][-1] < row["seconds"][-1] and mine["slope"] < row["slope"] for row in others)
    text = "; ".join(f"{row['method']}: n ^ {row['slope']:.2f}" for row in (mine, *others))
    return Claim(paper, "reproduced" if least else "not reproduced", text)


class Point(NamedTuple):
    """What a method is worth at a budget."""

    method: str
    budget: Budget
    value: float
    low: float
    high: float


def draw(folder: Path = FOLDER) -> None:
    """Draw quality against budget: the mean over tasks, and the KL of all texts, a line for every method."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    panels: list[tuple[str, str, list[Point]]] = []
    for file in (run for run in joined(read(folder)[0]) if not _is_ablation(run)):
        means = [row for row in summarise(file.tasks) if row.task == MEAN]
        for length, protocol in dict.fromkeys((row.length, row.protocol) for row in means):
            own = [row for row in means if (row.length, row.protocol) == (length, protocol)]
            points = [Point(row.method, row.budget, row.score, row.low, row.high) for row in own]
            panels.append((f"{_trained(file)}{_length(length)}, question {protocol}", "mean score over tasks", points))
        texts = summarise_texts(file.texts)
        if texts:
            last = [row for row in texts if row.text == texts[-1].text]
            points = [Point(row.method, row.budget, row.kl, row.low or row.kl, row.high or row.kl) for row in last]
            panels.append((f"{_title(file)}, {_text_name(last[0].text)}", "KL to the full cache", points))
    methods = [*dict.fromkeys(point.method for *_, points in panels for point in points if point.method != FULL)]
    columns = min(4, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    figure = Figure(figsize=(4.5 * columns + 3, 4 * rows), layout="constrained")
    every_axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for unused in every_axes[len(panels) :]:
        unused.remove()
    lines: dict[str, Any] = {}
    for axes, (title, quantity, points) in zip(every_axes, panels, strict=False):
        for method in methods:
            own_points = [point for point in points if point.method == method and isinstance(point.budget, float)]
            own_points.sort(key=lambda point: point.budget)
            shares = [100 * point.budget for point in own_points]
            if not own_points:
                continue
            colour, width = colormaps["tab20"](methods.index(method) % 20), 2.5 if _is_ours(method) else 1
            values = [point.value for point in own_points]
            style = {"marker": "o"} if methods.index(method) < 20 else {"marker": "x", "linestyle": "--"}  # colours end
            (lines[_name(method)],) = axes.plot(shares, values, color=colour, linewidth=width, **style)
            if _is_ours(method):  # those of the others are as wide, and would hide each other
                bounds = zip(*((point.low, point.high) for point in own_points), strict=True)
                axes.fill_between(shares, *bounds, alpha=0.1, color=colour)
        axes.set(xlabel="kept, %", ylabel=quantity, title=title)
        axes.grid(alpha=0.3)
    figure.legend(lines.values(), lines.keys(), loc="outside right center", fontsize="small")
    figure.savefig(folder / PLOT, dpi=72, metadata={"Software": None})


def _trained(file: File) -> str:
    """The tasks of a file that its model was trained on, in front of what else is said of them."""
    return "".join(
        f"{task} (trained on), " for task in dict.fromkeys(each.task for each in file.tasks) if task in TRAINED
    )


def _length(length: int) -> str:
    return f"{length:,} tokens" if length else "prompts of files"


def _kept(budget: Budget) -> str:
    return "all" if budget is None else f"{budget:,} slots" if isinstance(budget, int) else f"{100 * budget:g} %"


def _table(heads: Sequence[str], rows: Iterator[list[str]] | list[list[str]]) -> str:
    return tabulate(list(rows), headers=heads, tablefmt="github", disable_numparse=True)


def main() -> None:
    """Print the page, or write it and draw its picture."""
    parser = argparse.ArgumentParser(description="The page of results, from the outcomes of runs.")
    parser.add_argument("--write", type=Path, help="write the page to a file instead of printing it, and draw")
    written = parser.parse_args().write
    if written is None:
        print(page(), end="")
    else:
        written.write_text(page(), encoding="utf-8")
        draw()


if __name__ == "__main__":
    main()
