"""What commands show: tables, sizes, a picture and bars, of the documents that they print as JSON too."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table

from ckv_compile.errors import ConfigError


def artifact(path: str, document: dict[str, Any]) -> None:
    """Print what an artifact holds."""
    config = document["config"]
    out = _stdout()
    out.print(
        f"{document['format']} in {path}, {size(document['bytes'])}: made with torch {document['torch']} for "
        f"{document['device']}, {document['cache']['dtype']}"
    )
    out.print(
        f"budget {config['budget']:,}, interval {config['interval']}: cache of one row {size(document['row_bytes'])}"
    )
    compiled = ", ".join(map(str, document["aot"])) or "none"
    out.print(f"decode steps for rows: {', '.join(map(str, document['decode']))}; compiled ahead of time: {compiled}")
    if document["obstacle"]:
        out.print(f"cannot be loaded here: {document['obstacle']}")
    elif document["aot"] and document["aot_obstacle"]:
        out.print(f"its compiled steps cannot be used here: {document['aot_obstacle']}")
    out.print(_layers_table(document["groups"]))
    out.print(_passes_table(document["passes"]))
    files = [[name, size(file["bytes"]), file["sha256"][:12]] for name, file in document["files"].items()]
    out.print(_table(["file", "size", "SHA-256"], files))


def model(document: dict[str, Any]) -> None:
    """Print what was found in a model, and what its caches take."""
    out = _stdout()
    out.print(
        f"{document['class']}, {document['dtype']}, weights {size(document['weights_bytes'])}, "
        f"{document['query_heads']} query heads, context {document['context'] or 'without an end'}"
    )
    out.print(_layers_table(document["groups"]))
    out.print(_passes_table(document["passes"]))
    rows = [
        [f"{row['context']:,}", size(row["full"]), *map(size, row["budgets"].values())] for row in document["row_bytes"]
    ]
    out.print(_table(["context", "full cache", *document["row_bytes"][0]["budgets"]], rows, title="cache of one row"))


def plan(document: dict[str, Any], chunk: int) -> None:
    """Print what fits in a memory, and what a prefill in chunks takes."""
    out = _stdout()
    out.print(
        f"{document['model']} in {document['dtype']}: weights {size(document['weights_bytes'])} of "
        f"{size(document['memory_bytes'])}, context {document['context'] or 'without an end'}, prefill "
        f"{'at once' if document['prefill_chunk'] is None else f'in chunks of {chunk:,}'}"
    )
    names = document["contexts"][0]["largest_batch"]
    out.print(
        _table(
            ["context", *names, "prefill at once", f"in chunks of {chunk:,}"],
            [
                [
                    f"{row['context']:,}",
                    *row["largest_batch"].values(),
                    f"~ {size(row['prefill_bytes'])}",
                    f"~ {size(row['chunked_prefill_bytes'])}",
                ]
                for row in document["contexts"]
            ],
            title="largest batch",
        )
    )
    out.print(
        _table(
            ["rows", *names],
            [
                [row["batch"], *("any" if n is None else f"{n:,}" for n in row["longest_context"].values())]
                for row in document["batches"]
            ],
            title="longest context",
        )
    )


def qualities(rows: Sequence[dict[str, Any]]) -> None:
    """Print what methods and budgets cost in predicting each text, and all of them."""
    for text in dict.fromkeys(row["text"] for row in rows):
        own = [row for row in rows if row["text"] == text]
        cells = [
            [
                row["method"],
                label(row["budget"]),
                f"{row['perplexity']:.2f}",
                f"{max(0.0, row['kl']):.4f}" + (f" ± {row['high'] - row['kl']:.4f}" if row["high"] is not None else ""),
                f"{row['agreement']:.1%}",
            ]
            for row in own
        ]
        title = f"{'all texts' if text == 'mean' else text}, {own[0]['windows']} windows"
        _stdout().print(title, _table(["method", "kept", "perplexity", "KL", "same first"], cells), sep="\n")


def scores(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table for every task, length and protocol: methods down, budgets across."""
    prompts = list(dict.fromkeys((row["task"], row["length"], row["protocol"]) for row in rows))
    budgets = list(dict.fromkeys(row["budget"] for row in rows if row["budget"] is not None))
    for prompt in prompts:
        own = [row for row in rows if (row["task"], row["length"], row["protocol"]) == prompt]
        cells = {
            (row["method"], row["budget"]): f"{row['score']:.0%} ({row['low']:.0%} - {row['high']:.0%})" for row in own
        }
        task, length, protocol = prompt
        tokens = f"{length:,} tokens" if length else "prompts of files"
        title = (
            f"{'mean over tasks' if task == 'mean' else task}, {tokens}, question {protocol}, "
            f"{own[0]['samples']} samples: full cache "
            f"{cells['full', None]}{'' if own[0]['says_something'] else ', so it says nothing: below 70%'}"
        )
        methods = list(dict.fromkeys(method for method, _ in cells if method != "full"))
        table = [[method, *(cells[method, budget] for budget in budgets)] for method in methods]
        _stdout().print(title, _table(["method", *map(label, budgets)], table), sep="\n")


def contest(document: dict[str, Any]) -> None:
    """Print a table for every context and batch."""
    out, machine = _stdout(), document["machine"]
    out.print(
        f"{document['model']} in {document['dtype']} on {machine['name']}, {machine['threads']} threads, torch "
        f"{machine['torch']}, transformers {machine['transformers']}, {machine['date']}: {document['tokens']} tokens x "
        f"{document['rounds']} rounds, medians (prefill: range over the rounds; token: quartiles)"
    )
    for title, rows in contest_tables(document):
        out.print(title, _table(CONTEST_HEADS, rows), sep="\n")
    for row in document["rows"]:
        if row["failed"]:
            out.print(f"{contestant(row)}, context {row['context']:,}, batch {row['batch']}: {row['failed']}")


CONTEST_HEADS = (
    *("contestant", "prefill s", "compression s", "ms/token", "tokens/s", "floor ms", "x floor"),
    *("peak", "cache", "compile s, cold", "warm"),
)
"""Of the columns of `contest_tables`."""


def contest_tables(document: dict[str, Any]) -> Iterator[tuple[str, list[list[str]]]]:
    """A title, and a row for every contestant, of every context and batch."""
    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in document["rows"]):
        rows = [row for row in document["rows"] if (row["context"], row["batch"]) == (context, batch)]
        beyond = document["own_context"] is not None and context > document["own_context"]
        title = f"context {context:,}{' (beyond the model, for speed alone)' if beyond else ''}, batch {batch}"
        yield title, [_contest_cells(row) for row in rows]


def _contest_cells(row: dict[str, Any]) -> list[str]:
    if row["failed"]:
        return [contestant(row), "-" if len(row["failed"]) > 30 else row["failed"], *"-" * (len(CONTEST_HEADS) - 2)]
    step, floor = row["step_s"], row["floor_s"]
    return [
        contestant(row),
        _spread(row["prefill_s"], 1.0, 2),
        _seconds(row["compression_s"], 2),
        _spread(step, 1e3, 1),
        f"{row['tokens_per_s']:.1f}",
        f"{1e3 * floor:.1f}",
        f"{step['median'] / floor:.2f}",
        "-" if row["peak_bytes"] is None else size(row["peak_bytes"]),
        size(row["cache_bytes"]),
        _seconds(row["compile_cold_s"], 1),
        _seconds(row["compile_warm_s"], 1),
    ]


def contestant(row: dict[str, Any]) -> str:
    """The name of a contestant with what it keeps."""
    is_ours = row["kind"] in ("ours", "ours-int8")
    return f"{row['name']}, {label(row['kept'])}" if is_ours or row["kept"] is not None else row["name"]


def _spread(found: dict[str, float], unit: float, digits: int) -> str:
    median, low, high = (f"{unit * found[name]:.{digits}f}" for name in ("median", "low", "high"))
    return f"{median} ({low} - {high})"


def _seconds(found: float | None, digits: int) -> str:
    return "-" if found is None else f"{found:.{digits}f}"


def contest_plots(document: dict[str, Any], folder: Path) -> list[Path]:
    """Draw time per token and memory against context, a picture of each for every batch; return their files.

    Raises:
        OSError: if a file cannot be written.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for batch in dict.fromkeys(row["batch"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["batch"] == batch and not row["failed"]]
        for name, kinds in _PLOTS.items():
            figure = Figure(figsize=(3 + 6 * len(kinds), 5), layout="constrained")
            for axes, (what, value) in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
                axes.set_prop_cycle(color=colormaps["tab20"](range(20)))  # there may be more lines than usual colours
                for each in dict.fromkeys(map(contestant, rows)):
                    points = [(row["context"], value(row)) for row in rows if contestant(row) == each]
                    points = [point for point in points if point[1] is not None]
                    axes.plot(*zip(*sorted(points), strict=True), marker="o", label=each)
                contexts = sorted({row["context"] for row in rows})
                axes.set_xscale("log", base=2)
                axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
                axes.set_ylim(bottom=0)
                axes.set(xlabel="context, tokens", ylabel=what)
                axes.grid(alpha=0.3)
            figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small")
            figure.suptitle(f"{document['model']} in {document['dtype']}, batch {batch}, {document['machine']['name']}")
            written.append(folder / f"{name}-batch{batch}.png")
            figure.savefig(written[-1], dpi=150)
    return written


_PLOTS: dict[str, list[tuple[str, Callable[[dict[str, Any]], float | None]]]] = {
    "time": [("milliseconds per token (median)", lambda row: 1e3 * float(row["step_s"]["median"]))],
    "memory": [
        ("peak memory, MB", lambda row: None if row["peak_bytes"] is None else row["peak_bytes"] / 1e6),
        ("cache, MB", lambda row: float(row["cache_bytes"]) / 1e6),
    ],
}


def plot(document: dict[str, Any], path: Path) -> None:
    """Draw the largest batch against the context, a line for every cache.

    Raises:
        ConfigError: if the name of the file tells no kind of picture.
        OSError: if the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    contexts = [row["context"] for row in document["contexts"]]
    for name in document["contexts"][0]["largest_batch"]:
        batches = [row["largest_batch"][name] or float("nan") for row in document["contexts"]]
        axes.plot(contexts, batches, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="context, tokens", ylabel="largest batch, rows")
    axes.set_title(f"{document['model']}, {document['dtype']}, {size(document['memory_bytes'])}")
    axes.grid(alpha=0.3)
    axes.legend(title="cache")
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError(f"--plot {path}: {error}") from error


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """Say what takes time, on a terminal."""
    with Console(stderr=True).status(what):
        yield


@contextlib.contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, as a function of what is done and how much there is; it goes once all is."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)
            if done == total:
                progress.stop()  # or it would write between the tokens that follow

        yield show


def took(prompt: int, tokens: int, prefill_s: float, decode_s: float, cache_bytes: int) -> str:
    """Say what a prompt and its answer took."""
    return (
        f"{prompt:,} tokens read in {prefill_s:.1f} s, {tokens:,} generated in {decode_s:.1f} s "
        f"({tokens / decode_s:.1f} tokens/s), cache {size(cache_bytes)}"
    )


def size(count: int) -> str:
    """Bytes as KB, MB or GB."""
    unit, name, digits = (1e3, "KB", 1) if count < 1e6 else (1e6, "MB", 1) if count < 1e9 else (1e9, "GB", 2)
    return f"{count / unit:,.{digits}f} {name}"


def label(budget: int | float | None) -> str:
    """The name of a budget in tables; None is the full cache."""
    if budget is None:
        return "full cache"
    return f"{budget:,} slots" if isinstance(budget, int) else f"{100 * budget:g}%"


def calibration(document: dict[str, Any]) -> None:
    """Print what each layer loses, and the option for those that lose least."""
    out, light = _stdout(), set(document["light_layers"])
    total = sum(loss["kl"] for loss in document["losses"]) or 1.0
    rows = [
        [loss["layer"], f"{loss['kl']:.5f}", f"{loss['kl'] / total:.1%}", "light" if loss["layer"] in light else ""]
        for loss in document["losses"]
    ]
    out.print(
        _table(
            ["layer", "KL", "of all", ""],
            rows,
            title=f"one layer alone with {document['share'] * document['context']:.0f} slots",
        )
    )
    out.print(f"--light-layers {document['option']}")


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*map(str, row))
    return table


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON document."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def _stdout() -> Console:
    """Where tables go; one in a file is not cut to the width of a terminal."""
    return Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)


def _layers_table(groups: Iterable[dict[str, Any]]) -> Table:
    names = ("kind", "layers", "kv_heads", "head_dim", "window")
    return _table(
        ["kind", "layers", "KV heads", "head size", "window"],
        [[each.get(name, "-") for name in names] for each in groups],
    )


def _passes_table(passes: Iterable[dict[str, Any]]) -> Table:
    return _table(
        ["pass", "sites", "s"], [[each["name"], each["matches"], f"{each['seconds']:.2f}"] for each in passes]
    )
