"""Methods on prompts and texts: one exact prefill of each, compressed by every method to every budget, and replies.

The reader is a model whose graph compacts nothing. It runs the exact prefill, while an interpreter looks at what each
attention gets; methods make their slots of that, layer by layer, the product's own among them. Rows of slots then read
on as batches of the reader, so that methods differ in the compression alone.

Protocols: "inside" compresses context and question together; the first token of the reply then comes from the exact
prefill. "after" compresses the context, and the question is a later turn, over the slots.

Nothing is compacted again while a question is read, a reply generated or a text predicted, unless a candidate of the
product says an interval: it then predicts texts by its own steps, token by token.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from transformers import PreTrainedModel

from ckv_compile.cache import CacheState
from ckv_compile.clustering import observe_
from ckv_compile.config import CKVConfig
from ckv_compile.errors import ConfigError, InputError
from ckv_compile.evaluation.ablations import most_slots
from ckv_compile.evaluation.candidates import KNOWN, Candidate, Compression, compression
from ckv_compile.evaluation.language import divergences
from ckv_compile.evaluation.methods import FULL, Layer
from ckv_compile.evaluation.outcomes import Budget, Outcome, TextOutcome
from ckv_compile.evaluation.tasks import Prompt, Sample
from ckv_compile.model import rewrite_model
from ckv_compile.ops import cached_attention, window_attention
from ckv_compile.pipeline import Rewritten
from ckv_compile.plan import slots_of

Protocol = Literal["inside", "after"]
PROTOCOLS: tuple[Protocol, ...] = ("inside", "after")

_SLOTS = 256  # of the reader's own plan, which nothing looks at: its states have as many as they need
_ROWS = 32  # that read at once: more gain little on a CPU, and all wait for the longest reply
_PARTS = 8  # of the predicted tokens, whose divergences are told apart


class Chosen(NamedTuple):
    """A candidate at a budget as it was asked for."""

    candidate: Candidate
    budget: Budget | None  # None for the full cache


class Reader:
    """A model that reads the slots of every method.

    Args:
        model: the original model, in evaluation mode.
        **options: fields of `CKVConfig` in `candidates.OPTIONS`.

    Raises:
        ConfigError: for a bad option.
        UnsupportedModelError: if the model cannot be transformed.
    """

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        self.original = model
        self.options = options
        own = {name: value for name, value in options.items() if name == "max_context"}
        rewritten, _ = rewrite_model(model, CKVConfig(budget=_SLOTS, interval=1, **own), {})
        self.graph, self.shape = rewritten.graph, rewritten.shape
        attentions = [node for node in self.graph.graph.nodes if node.target in (cached_attention, window_attention)]
        self.clustered_layers = [i for i, node in enumerate(attentions) if node.target is cached_attention]
        self._clustered: dict[CKVConfig, Rewritten] = {}  # whose steps compact
        embeddings = [module for name, module in model.named_modules() if name.endswith("rotary_emb")]
        self._rotary = embeddings[0] if len(embeddings) == 1 and not self.shape.window_layers else None

    @property
    def device(self) -> torch.device:
        """Where tokens and states are."""
        return self.shape.device

    @torch.no_grad()
    def prefill(
        self, ids: Tensor, wanted: Sequence[tuple[int, Compression]], room: int
    ) -> tuple[Tensor, list[CacheState]]:
        """Run the exact prefill of a prompt [1, n], and compress the first tokens of it.

        Args:
            ids: int64.
            wanted: how many of its tokens are compressed, and how, for every row.
            room: free slots of every row, for what it will read.

        Returns:
            Logits of the last token [1, 1, vocab]; and the rows, in batches of at most `_ROWS`, in their order.

        Raises:
            ConfigError: for light layers that the model has not.
        """
        for number in {layer for _, how in wanted for layer in how.config.light_layers}:
            if number not in self.clustered_layers:
                raise ConfigError(
                    f"light_layers: {number} is no layer without a sliding window of this model; those are "
                    f"{', '.join(map(str, self.clustered_layers))}"
                )
        plans = [how.plans(length, self.shape.layers) for length, how in wanted]
        batches = []
        for start in range(0, len(wanted), _ROWS):
            # Layers that keep fewer leave slots empty, which count for nothing.
            kept = [
                max(most_slots(how.candidate.method, plan) for plan in both)
                for (_, how), both in list(zip(wanted, plans, strict=True))[start : start + _ROWS]
            ]
            state = CacheState.allocate(self.shape, max(kept) + room + 1, len(kept))
            state.fill.copy_(torch.tensor(kept))
            state.position.copy_(torch.tensor([length for length, _ in wanted[start : start + _ROWS]]))
            batches.append(state)
        rows = [batches[i // _ROWS].row(i % _ROWS) for i in range(len(wanted))]
        alike: dict[tuple[Any, ...], list[int]] = {}  # rows that a method makes at once, of the same tokens
        for i, (length, how) in enumerate(wanted):
            but_budget = dataclasses.replace(how.config, budget=_SLOTS)
            alike.setdefault((length, how.candidate.method, but_budget), []).append(i)
        rope = None
        if self._rotary is not None:
            anything = torch.zeros(1, dtype=self.shape.dtype, device=self.device)
            cos, sin = self._rotary(anything, torch.arange(ids.shape[1], device=self.device)[None])
            rope = (cos[0], sin[0])

        def see(windowed: bool, given: dict[str, Any]) -> None:
            q, k, v = (given[name][0] for name in "qkv")
            whole, index = Layer(q, k, v, given["scale"], given["softcap"], given["sinks"], rope), given["layer"]
            for (length, method, _), members in alike.items():
                layer = whole.until(length)
                if windowed:
                    for i in members:
                        _fill_ring(rows[i], index, layer)
                    continue
                own = [plans[i][self.clustered_layers[index] in wanted[i][1].config.light_layers] for i in members]
                made = KNOWN[method](layer, own)
                queries, last = (part[0, index] for part in rows[members[0]][3:5])
                observe_(queries, last, layer.q, layer.scale, position=0)
                for i, slots in zip(members, made, strict=True):
                    count = slots.degree.shape[1]
                    rows[i].queries[0, index], rows[i].last_queries[0, index] = queries, last
                    for target, source in zip(rows[i][:3], slots, strict=True):
                        target[0, index, :, :count] = source

        state = CacheState.allocate(self.shape, ids.shape[1] + 1, 1)
        (logits,) = _Watched(self.graph, see).run(ids, *state)
        return logits, batches

    @torch.no_grad()
    def reply(
        self,
        batches: Sequence[CacheState],
        turns: Sequence[Tensor | None],
        logits: Tensor,
        tokens: int,
        ends: Callable[[list[int]], bool],
    ) -> list[list[int]]:
        """Generate greedily.

        Args:
            batches: rows of `prefill`.
            turns: for every row the tokens [1, S] int64 that it reads first; or None. Rows with a turn have the same,
                and stand beside each other.
            logits: [1, 1, vocab], of the last token that the rows without a turn have read.
            tokens: to generate at most.
            ends: whether a reply need not go on.

        Returns:
            The tokens of every row; what follows the end of a reply means nothing.
        """
        replies: list[list[int]] = []
        for state in batches:
            rows = len(state.fill)
            own = turns[len(replies) : len(replies) + rows]
            found = logits[:, -1].repeat(rows, 1)
            reading = [b for b, turn in enumerate(own) if turn is not None]
            if reading:
                some = slice(reading[0], reading[-1] + 1)
                turn = own[some.start]
                assert turn is not None
                part = CacheState(*(tensor[some] for tensor in state))
                found[some] = self.graph(turn.repeat(len(reading), 1), *part)[0][:, -1]
            new = found.argmax(dim=-1, keepdim=True)
            while new.shape[1] < tokens and not all(map(ends, new.tolist())):
                found = self.graph(new[:, -1:].contiguous(), *state)[0]
                new = torch.cat([new, found[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
            replies += new.tolist()
        return replies

    @torch.no_grad()
    def predictions(self, row: CacheState, first: Tensor, tokens: Tensor, compression: Compression) -> Tensor:
        """Log probabilities [n, vocab] float32 of the tokens [1, n] that follow, each after the real ones before it.

        Args:
            row: one of `prefill`, with room for them.
            first: [1, 1, vocab], logits of the last token that the row has read.
            tokens: int64.
            compression: by which the row was made; with an interval its own steps read the tokens.
        """
        before = tokens[:, :-1]
        if "interval" not in compression.candidate.options:
            rest = _Watched(self.graph, None).run(before, *row)[0].view(1, before.shape[1], -1)
        else:
            steps = self._steps_of(compression.config)
            state = self._in_groups(row, steps, compression)
            rest = [steps.graph(token, *state)[0] for token in before.split(1, dim=1)]
            rest = torch.cat([first[:, :0], *rest], dim=1)
        return torch.cat([first, rest], dim=1)[0].float().log_softmax(dim=-1)

    def _steps_of(self, config: CKVConfig) -> Rewritten:
        if config not in self._clustered:
            self._clustered[config] = rewrite_model(self.original, config, {})[0]
        return self._clustered[config]

    def _in_groups(self, row: CacheState, steps: Rewritten, compression: Compression) -> CacheState:
        """The state that the product has where a row of `prefill`, with all layers in one group, stands."""
        state = CacheState.planned(steps.shape, steps.plans, 1)
        is_light = torch.tensor(
            [number in compression.config.light_layers for number in self.clustered_layers], dtype=torch.bool
        )
        for target, layers in ((state.main, ~is_light), (state.light, is_light)):
            for slots, source in zip(target[:3], row[:3], strict=True):
                count = min(slots.shape[3], source.shape[3])  # those behind are empty
                slots[:, :, :, :count] = source[:, layers, :, :count]
            target[3][:], target[4][:] = row.queries[:, layers], row.last_queries[:, layers]
        kept = compression.plans(int(row.position), self.shape.layers)
        for fill, plan in zip((state.fill, state.light_fill), kept, strict=True):
            fill.fill_(plan.budget)
        for own, source in zip((state.position, state.window_keys, state.window_values), row[7:10], strict=True):
            own.copy_(source)
        return state


class _Watched(Interpreter):
    """Runs a rewritten graph, and shows what each attention is called with, by the names of its arguments.

    With nothing to show it to, it gives the logits of all tokens, and not of the last one alone.
    """

    def __init__(self, graph: GraphModule, see: Callable[[bool, dict[str, Any]], None] | None) -> None:
        super().__init__(graph)
        self.see = see

    def run_node(self, node: Node) -> Any:
        if self.see is None and _is_last_token(node):
            return self.env[node.all_input_nodes[0]]
        out = super().run_node(node)
        if self.see is not None and node.target in (cached_attention, window_attention):
            names = [argument.name for argument in node.target._schema.arguments]
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            self.see(node.target is window_attention, dict(zip(names, args, strict=False)) | kwargs)
        return out


def _is_last_token(node: Node) -> bool:
    """Whether this is what `slice_logits` put before the head."""
    return node.target is torch.ops.aten.slice.Tensor and node.args[1:3] == (1, -1)


def _fill_ring(row: CacheState, index: int, layer: Layer) -> None:
    """Keep the last tokens of a layer with a sliding window, token t in slot t % W."""
    window, tokens = row.window_keys.shape[3], layer.k.shape[1]
    last = torch.arange(max(0, tokens - window), tokens, device=layer.k.device)
    row.window_keys[0, index][:, last % window] = layer.k[:, last]
    row.window_values[0, index][:, last % window] = layer.v[:, last]


def choose(candidates: Sequence[Candidate], budgets: Sequence[Budget]) -> list[Chosen]:
    """The full cache, then every candidate at every budget, each once."""
    asked = (Chosen(each, budget) for each in candidates if each.method != FULL for budget in budgets)
    distinct = {(each.candidate.label, each.budget): each for each in asked}
    return [Chosen(Candidate(FULL, FULL, {}), None), *distinct.values()]


def compressions(chosen: Sequence[Chosen], length: int, options: Mapping[str, Any]) -> list[Compression]:
    """The candidates at their budgets of so many tokens.

    Raises:
        ConfigError: for an option or a budget that the product refuses.
    """
    return [
        compression(each.candidate, length if each.budget is None else slots_of(each.budget, length), options)
        for each in chosen
    ]


def run(
    reader: Reader, tokenizer: Any, prompt: Prompt, chosen: Sequence[Chosen], protocols: Sequence[Protocol] = PROTOCOLS
) -> list[Outcome]:
    """The replies to one prompt, of all candidates under all protocols.

    Args:
        reader: of the model.
        tokenizer: its tokenizer.
        prompt: what is asked.
        chosen: of `choose`.
        protocols: when the question comes.

    Raises:
        ConfigError: for a bad budget or option, or an interval, which is for texts.
    """
    for each in chosen:
        if "interval" in each.candidate.options:
            raise ConfigError(f"{each.candidate.label!r}: an interval is for texts; nothing is compacted in a reply")
    sample = prompt.sample
    ids = torch.tensor([sample.context + sample.question], device=reader.device)
    known = len(sample.context)
    made = compressions(chosen, ids.shape[1], reader.options)
    rows = [(protocol, how, each) for protocol in protocols for how, each in zip(made, chosen, strict=True)]
    turns = [None if protocol == "inside" else ids[:, known:] for protocol, _, _ in rows]
    wanted = [(ids.shape[1] if protocol == "inside" else known, how) for protocol, how, _ in rows]
    logits, batches = reader.prefill(ids, wanted, len(sample.question) + sample.reply)
    said = Said(tokenizer, reader.original, sample)
    replies = map(said.text, reader.reply(batches, turns, logits, sample.reply, said.ends))
    where = (prompt.task, prompt.length, prompt.depth, prompt.seed)
    return [
        Outcome(*where, protocol, each.candidate.label, each.budget, sample.metric(sample.answers, reply), reply)
        for (protocol, _, each), reply in zip(rows, replies, strict=True)
    ]


class Said:
    """What the tokens of a reply say."""

    def __init__(self, tokenizer: Any, model: PreTrainedModel, sample: Sample) -> None:
        own = model.generation_config.eos_token_id
        self.stops = {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id} - {None}
        self.tokenizer = tokenizer
        self.sample = sample

    def text(self, tokens: list[int]) -> str:
        """The reply until its end."""
        stop = next((i for i, token in enumerate(tokens) if token in self.stops), len(tokens))
        text: str = self.tokenizer.decode(tokens[:stop], skip_special_tokens=True)
        return text

    def ends(self, tokens: list[int]) -> bool:
        """Whether nothing that follows can change the score."""
        if any(token in self.stops for token in tokens):
            return True
        return self.sample.found(self.text(tokens))


@torch.no_grad()
def predict(
    reader: Reader, name: str, window: int, text: Tensor, predicted: int, chosen: Sequence[Chosen]
) -> list[TextOutcome]:
    """Predict the last tokens of a window of a text, each after the real ones before it, by every candidate.

    The reference is the full cache of the same model. The beginning is compressed once, and the cache then grows, but
    for candidates with an interval.

    Args:
        reader: of the model.
        name: of the text.
        window: which of its windows this is.
        text: [1, S] int64; all but its last `predicted` tokens are the beginning that is compressed.
        predicted: tokens to predict.
        chosen: of `choose`. Shares are those of the whole window.

    Raises:
        InputError: if the window is no longer than what is to be predicted.
        ConfigError: for a bad budget or option.
    """
    if not 0 < predicted < text.shape[1]:
        raise InputError(f"{predicted} tokens to predict of a text of {text.shape[1]}: predict at least 1, and fewer")
    beginning, rest = text[:, :-predicted], text[:, -predicted:]
    made = compressions(chosen, text.shape[1], reader.options)
    first, batches = reader.prefill(beginning, [(beginning.shape[1], how) for how in made], predicted)
    rows = [batch.row(b) for batch in batches for b in range(len(batch.fill))]
    full: Tensor | None = None
    outcomes = []
    for each, row, how in zip(chosen, rows, made, strict=True):
        found = reader.predictions(row, first, rest, how)
        full = found if full is None else full
        kl = divergences(found, full)
        outcomes.append(
            TextOutcome(
                *(name, window, each.candidate.label, each.budget),
                nll=float(-found.gather(1, rest[0][:, None]).mean()),
                kl=float(kl.mean()),
                agreement=float((full.argmax(dim=-1) == found.argmax(dim=-1)).float().mean()),
                kl_parts=[float(part.mean()) for part in kl.tensor_split(min(_PARTS, predicted))],
            )
        )
    return outcomes
