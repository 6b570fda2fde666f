"""Methods on tasks: one exact prefill of each prompt, compressed by every method to every budget, and the replies.

The reader is a transformed model that compacts nothing. Its graph runs the exact prefill, while an interpreter looks
at what each attention gets; methods make their slots of that, layer by layer. Slots go into a cache of the reader,
whose own steps read them, so that methods differ in the compression alone. The slots of "ours" come from a prefill of
the model transformed with that budget, which is the product as it is.

Protocols: "inside" compresses context and question together; the first token of the reply then comes from the exact
prefill. "after" compresses the context, and the question is a later turn, over the slots.

Nothing is compacted again while a question is read or a reply generated.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter
from transformers import PreTrainedModel

from ckv_compile.cache import CacheState, ClusteredCache
from ckv_compile.config import CKVConfig
from ckv_compile.errors import ConfigError, InputError
from ckv_compile.evaluation.language import Quality, quality_of
from ckv_compile.evaluation.methods import FULL, METHODS, OURS, Keep, Layer
from ckv_compile.evaluation.tasks import Sample, make, score
from ckv_compile.model import CKVForCausalLM, transform
from ckv_compile.ops import cached_attention, window_attention
from ckv_compile.plan import slots_of

Protocol = Literal["inside", "after"]
PROTOCOLS: tuple[Protocol, ...] = ("inside", "after")
SAYS_SOMETHING = 0.7
"""What the full cache scores at least in a task that can tell methods apart."""

_Z = 1.959963984540054  # of a standard normal variable, 95 % lie between -z and z


class Compression(NamedTuple):
    """A method, and the slots per KV head that it keeps."""

    method: str
    slots: int  # the full cache keeps all tokens, whatever this is

    def kept(self, tokens: int) -> int:
        """Slots that stay of a prompt."""
        return tokens if self.method == FULL else min(self.slots, tokens)


class Outcome(NamedTuple):
    """One reply."""

    task: str
    length: int
    depth: float
    seed: int
    protocol: str
    method: str
    budget: int | float | None  # as it was asked for; None for the full cache
    score: float
    reply: str


class Row(NamedTuple):
    """The replies of one method and budget to the prompts of one task, length and protocol."""

    task: str
    length: int
    protocol: str
    method: str
    budget: int | float | None
    samples: int
    score: float  # mean
    low: float  # of its 95 % interval
    high: float
    says_something: bool  # whether the full cache scores at least 70 % there


class Reader:
    """A model that reads the slots of every method.

    Args:
        model: the original model, in evaluation mode.
        longest: tokens of the longest prompt and its reply.
        **options: fields of `CKVConfig`, but not its budget and interval: nothing is compacted in a reply.

    Raises:
        ConfigError: for a bad option.
        UnsupportedModelError: if the model cannot be transformed.
    """

    def __init__(self, model: PreTrainedModel, longest: int, **options: Any) -> None:
        self.original = model
        self.options = options
        self.model = transform(model, budget=longest, interval=1, compile="eager", **options)
        self._ours: dict[int, CKVForCausalLM] = {}

    @torch.no_grad()
    def prefill(
        self, ids: Tensor, lengths: Sequence[int], compressions: Sequence[Compression]
    ) -> tuple[Tensor, list[list[CacheState]]]:
        """Run the exact prefill of a prompt [1, n], and compress the first tokens of it.

        Args:
            ids: int64.
            lengths: how many of its tokens are compressed, each of them by all compressions.
            compressions: methods and budgets.

        Returns:
            Logits of the last token [1, 1, vocab]; and for every length the state of one row for each compression, with
            as many slots as it keeps.
        """
        states = [
            [CacheState.allocate(self.model.cache_shape, each.kept(length), 1) for each in compressions]
            for length in lengths
        ]
        for length, rows in zip(lengths, states, strict=True):
            for row in rows:
                row.fill.fill_(row.degree.shape[-1])
                row.position.fill_(length)

        def see(windowed: bool, given: dict[str, Any]) -> None:
            q, k, v = (given[name][0] for name in "qkv")
            layer = Layer(q, k, v, given["scale"], given["softcap"], given["sinks"])
            for length, rows in zip(lengths, states, strict=True):
                seen = layer.until(length)
                for compression, row in zip(compressions, rows, strict=True):
                    if windowed:
                        _fill_ring(row, given["layer"], seen)
                    elif compression.method != OURS:
                        self._fill_slots(row, given["layer"], seen, compression)

        watched = _Watched(self.model.graph, see)
        (logits,) = watched.run(ids, *self.model.new_cache().state)
        for length, rows in zip(lengths, states, strict=True):
            for i, compression in enumerate(compressions):
                if compression.method == OURS:
                    rows[i] = self._own_prefill(ids[:, :length], compression.slots)
        return logits, states

    def cache_of(self, rows: Sequence[CacheState]) -> ClusteredCache:
        """Put rows that have read as many tokens into one cache of the reader."""
        cache = self.model.new_cache(len(rows))
        for b, row in enumerate(rows):
            for target, source in zip(cache.state, row, strict=True):
                target[b][tuple(slice(size) for size in source[0].shape)].copy_(source[0])
        cache.columns = int(rows[0].position)
        return cache

    def batches(self, rows: Sequence[CacheState]) -> Iterator[ClusteredCache]:
        """Put rows into caches of as many as the reader takes at once."""
        most = self.model.ckv_config.max_batch_size
        for start in range(0, len(rows), most):
            yield self.cache_of(rows[start : start + most])

    def reply(
        self, rows: Sequence[CacheState], turn: Tensor | None, logits: Tensor | None, tokens: int
    ) -> list[list[int]]:
        """Generate greedily after rows that have read as many tokens.

        Args:
            rows: of `prefill`.
            turn: [1, S] int64, tokens that every row reads first; or None.
            logits: [1, 1, vocab], of the last token that the rows have read, where there is no turn.
            tokens: to generate, also behind the end of a reply.

        Returns:
            The tokens of every row.
        """
        replies: list[list[int]] = []
        for cache in self.batches(rows):
            found = logits if turn is None else self.model(turn.expand(cache.batch_size, -1), cache=cache).logits
            assert found is not None
            new = [found[:, -1].argmax(dim=-1, keepdim=True).expand(cache.batch_size, -1)]
            while len(new) < tokens:
                new.append(self.model(new[-1], cache=cache).logits[:, -1].argmax(dim=-1, keepdim=True))
            replies += torch.cat(new, dim=1).tolist()
        return replies

    def _fill_slots(self, row: CacheState, index: int, layer: Layer, compression: Compression) -> None:
        config = self.model.ckv_config
        slots = METHODS[compression.method](layer, Keep(row.degree.shape[-1], config.n_sink, config.n_recent))
        for target, source in zip((row.keys, row.values, row.degree), slots, strict=True):
            target[0, index] = source

    def _own_prefill(self, ids: Tensor, slots: int) -> CacheState:
        if slots not in self._ours:
            self._ours[slots] = transform(self.original, budget=slots, interval=1, compile="eager", **self.options)
        ours = self._ours[slots]
        cache = ours.new_cache()
        ours(ids, cache=cache)
        return cache.state


class _Watched(Interpreter):
    """Runs a rewritten graph, and shows what each attention is called with, by the names of its arguments."""

    def __init__(self, graph: GraphModule, see: Callable[[bool, dict[str, Any]], None]) -> None:
        super().__init__(graph)
        self.see = see

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call_function(target, args, kwargs)
        if target in (cached_attention, window_attention):
            names = [argument.name for argument in target._schema.arguments]
            self.see(target is window_attention, dict(zip(names, args, strict=False)) | kwargs)
        return out


def _fill_ring(row: CacheState, index: int, layer: Layer) -> None:
    """Keep the last tokens of a layer with a sliding window, token t in slot t % W."""
    window, tokens = row.window_keys.shape[3], layer.k.shape[1]
    last = torch.arange(max(0, tokens - window), tokens, device=layer.k.device)
    row.window_keys[0, index][:, last % window] = layer.k[:, last]
    row.window_values[0, index][:, last % window] = layer.v[:, last]


def run(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: Sequence[str],
    methods: Sequence[str],
    budgets: Sequence[int | float],
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int,
    protocols: Sequence[Protocol] = PROTOCOLS,
    **options: Any,
) -> Iterator[list[Outcome]]:
    """Run all methods with all budgets, and the full cache, on the same prompts.

    Args:
        model: the original model, in evaluation mode.
        tokenizer: its tokenizer.
        tasks: kinds of `tasks.KINDS`.
        methods: names of `methods.METHODS`, and OURS.
        budgets: slots per KV head, or shares of the length that are kept.
        lengths: tokens of the prompts, without the reply.
        depths: where the needle stands; the samples take them in turn.
        samples: prompts of every task and length, of seeds 0, 1, 2, ...
        protocols: when the question comes.
        **options: other fields of `CKVConfig`, for all methods as far as they have such a thing.

    Yields:
        The outcomes of one prompt, for each prompt.

    Raises:
        InputError: for a task that does not exist, or a length that its prompt does not fit in.
        ConfigError: for a bad budget, option or method.
        UnsupportedModelError: if the model cannot be transformed.
    """
    prompts = [
        (task, length, depth, seed, make(task, tokenizer, length, depth, seed))
        for task in tasks
        for length in lengths
        for seed, depth in zip(range(samples), itertools.cycle(depths))
    ]
    _check(methods, {slots_of(budget, length) for length in lengths for budget in budgets}, options)
    longest = max(length + sample.reply for _, length, _, _, sample in prompts)
    reader = Reader(model, longest, **options)
    chosen: dict[tuple[str, int | float | None], None] = {(FULL, None): None}  # in this order, each once
    chosen |= dict.fromkeys((method, budget) for method in methods if method != FULL for budget in budgets)
    for task, length, depth, seed, sample in prompts:
        compressions = [
            Compression(method, length if budget is None else slots_of(budget, length)) for method, budget in chosen
        ]
        outcomes = []
        for protocol, replies in _replies(reader, tokenizer, sample, protocols, compressions):
            for (method, kept), reply in zip(chosen, replies, strict=True):
                found = score(sample.answers, reply)
                outcomes.append(Outcome(task, length, depth, seed, protocol, method, kept, found, reply))
        yield outcomes


def _check(methods: Iterable[str], slots: Iterable[int], options: dict[str, Any]) -> None:
    """Refuse methods that do not exist, and for all of them the budgets and options that the product refuses."""
    for method in methods:
        if method not in (OURS, *METHODS):
            raise ConfigError(f"method {method!r}: choose among {', '.join((OURS, *METHODS))}")
    if "interval" in options:
        raise ConfigError(
            f"interval={options['interval']!r}: methods are compared without later compactions; leave it out"
        )
    for each in slots:
        CKVConfig.from_options({**options, "budget": each, "interval": 1})


def _replies(
    reader: Reader,
    tokenizer: Any,
    sample: Sample,
    protocols: Sequence[Protocol],
    compressions: Sequence[Compression],
) -> Iterator[tuple[Protocol, list[str]]]:
    """The replies to one prompt, for every protocol those of all compressions."""
    device = reader.model.device
    ids = torch.tensor([sample.context + sample.question], device=device)
    known = len(sample.context)
    lengths = [ids.shape[1] if protocol == "inside" else known for protocol in protocols]
    logits, states = reader.prefill(ids, lengths, compressions)
    ends = _ends(reader.model, tokenizer)
    for protocol, rows in zip(protocols, states, strict=True):
        inside = protocol == "inside"
        found = reader.reply(rows, None if inside else ids[:, known:], logits if inside else None, sample.reply)
        said = [list(itertools.takewhile(lambda token: token not in ends, reply)) for reply in found]
        yield protocol, [tokenizer.decode(reply, skip_special_tokens=True) for reply in said]


def _ends(model: CKVForCausalLM, tokenizer: Any) -> set[int]:
    """Tokens that end a reply."""
    own = model.generation_config.eos_token_id
    return {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id} - {None}


@torch.no_grad()
def predict(
    model: PreTrainedModel, text: Tensor, compressions: Sequence[Compression], predicted: int, **options: Any
) -> Iterator[Quality]:
    """Predict the last tokens of a text one by one, each after the real ones before it, by every method.

    The reference is the full cache of the same model. The prompt is compressed once, and the cache then grows: unlike
    `language.evaluate`, nothing is compacted while tokens are predicted, since other methods have no way to.

    Args:
        model: the original model, in evaluation mode.
        text: [1, S] int64; all but its last `predicted` tokens are the prompt that is compressed.
        compressions: methods and budgets.
        predicted: tokens to predict.
        **options: other fields of `CKVConfig`.

    Raises:
        InputError: if the text is no longer than what is to be predicted.
        ConfigError: for a bad budget, option or method.
        UnsupportedModelError: if the model cannot be transformed.
    """
    if not 0 < predicted < text.shape[1]:
        raise InputError(f"{predicted} tokens to predict of a text of {text.shape[1]}: predict at least 1, and fewer")
    prompt, rest = text[:, :-predicted], text[:, -predicted:]
    _check({each.method for each in compressions}, {each.slots for each in compressions}, options)
    reader = Reader(model, text.shape[1], **options)
    whole = Compression(FULL, prompt.shape[1])
    first, (rows,) = reader.prefill(prompt, [prompt.shape[1]], [whole, *compressions])
    full: Tensor | None = None
    for cache in reader.batches(rows):
        logits = [first.expand(cache.batch_size, -1, -1)]
        for token in rest[:, :-1].split(1, dim=1):
            logits.append(reader.model(token.expand(cache.batch_size, -1), cache=cache).logits)
        for b in range(cache.batch_size):
            found = torch.cat([step[b] for step in logits]).float().log_softmax(dim=-1)
            if full is None:
                full = found
                continue
            yield quality_of(found, full, rest[0])


def summarise(outcomes: Iterable[Outcome]) -> list[Row]:
    """Mean scores with their intervals, in the order of the outcomes."""
    scores: dict[tuple[str, int, str, str, int | float | None], list[float]] = defaultdict(list)
    for each in outcomes:
        scores[each.task, each.length, each.protocol, each.method, each.budget].append(each.score)
    rows = []
    for key, found in scores.items():
        reference = scores[key[0], key[1], key[2], FULL, None]
        says_something = sum(reference) >= SAYS_SOMETHING * len(reference)
        low, high = wilson(found)
        rows.append(Row(*key, len(found), sum(found) / len(found), low, high, says_something))
    return rows


def wilson(scores: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean of scores from 0 to 1 (Wilson, 1927).

    It is that of a share of successes. A score between 0 and 1 varies less than one that is either, so that for tasks
    with several answers it is a little too wide.
    """
    n, mean = len(scores), sum(scores) / len(scores)
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    return max(0.0, centre - half), min(1.0, centre + half)
