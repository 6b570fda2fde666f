"""What a cluster is: which tokens of a real text share a slot of the cache: make demo-clusters

Prefills a text into a clustered cache, and shows for one layer and KV head which tokens ended in which slot: as an HTML
page that colours each token by the degree of its slot, and as a short summary.

A cache keeps how many tokens a slot stands for, not which. Values are averaged like keys, so the same rounds are run
again on the same keys with one-hot values: a slot's value is then the mean of the indicators of its tokens. The degrees
that come out must be those of the cache.
"""

import argparse
import html
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from tabulate import tabulate
from torch import Tensor

import ckv_compile
from ckv_compile import clustering
from ckv_compile.cache import CacheState
from ckv_compile.evaluation import text_of
from ckv_compile.loading import SMOLLM2, load_model

COLOURS = {1: "#ffffff", 2: "#fff3c4", 4: "#fbd38d", 8: "#f6ad55", 16: "#ed8936", 1 << 30: "#e05d44"}
"""The colour of slots of up to so many tokens."""
SHOWN_CLUSTERS, SHOWN_MEMBERS = 5, 12

PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 2em auto; max-width: 60em; color: #222; }}
#text {{ font-family: monospace; white-space: pre-wrap; line-height: 1.5; }}
.key {{ padding: 0 0.6em; border: 1px solid #ccc; }}
#members {{ position: sticky; top: 0; min-height: 2.5em; padding: 0.5em; background: #eef; font-family: monospace; }}
.on {{ outline: 2px solid #3b5bdb; }}
{colours}
</style>
<h1>{title}</h1>
<p>{summary} Tokens in a slot: {legend}</p>
<p id="members">Point at a token to see which others share its slot.</p>
<div id="text">{tokens}</div>
<script>
const text = document.getElementById("text"), members = document.getElementById("members");
text.addEventListener("mouseover", event => {{
  const slot = event.target.dataset.slot;
  if (slot === undefined) return;
  text.querySelectorAll(".on").forEach(token => token.classList.remove("on"));
  const all = [...text.querySelectorAll(`[data-slot="${{slot}}"]`)];
  all.forEach(token => token.classList.add("on"));
  const words = all.map(token => `${{token.dataset.token}} ${{JSON.stringify(token.textContent)}}`);
  members.textContent = `slot ${{slot}}, ${{all.length}} tokens: ${{words.join(", ")}}`;
}});
</script>
</html>
"""


class Clusters(NamedTuple):
    """Where the tokens of a text are, in one layer."""

    slot: Tensor  # [Hkv, S] int64: the slot of each token
    degree: Tensor  # [Hkv, n] float32: tokens of each slot


def find_clusters(model: ckv_compile.CKVForCausalLM, ids: Tensor, layer: int) -> tuple[Clusters, Tensor]:
    """Prefill a prompt [1, S] and find the slots of its tokens in a clustered layer.

    Returns:
        The clusters, and the degrees [L, Hkv, n] of the cache in all layers.

    Raises:
        RuntimeError: if the clusters found are not those of the cache.
    """
    output = model(ids)
    state = output.get("cache", output.get("past_key_values")).state
    degree = state.degree[0, :, :, : int(state.fill)]
    clusters = memberships(exact_state(model, ids), layer, model.ckv_config)
    if not torch.equal(clusters.degree, degree[layer]):
        raise RuntimeError(f"the slots found for layer {layer} do not have the degrees of the cache")
    return clusters, degree


@torch.no_grad()
def exact_state(model: ckv_compile.CKVForCausalLM, ids: Tensor) -> CacheState:
    """The state after a prompt [1, S] before any round: by the same graph, with room for every token."""
    state = CacheState.allocate(model.cache_shape, ids.shape[1] + 1, batch_size=1)
    model.graph(ids, *state)
    return state


def memberships(state: CacheState, layer: int, config: ckv_compile.CKVConfig) -> Clusters:
    """Compress a layer as a prefill does, then its keys with one-hot values, D tokens at a time."""
    keys, values, degree = (part[0, layer, :, :-1] for part in state[:3])  # [Hkv, S, D], [Hkv, S]
    heads, tokens, dim = keys.shape
    rounds = config.schedule.rounds(tokens) if tokens >= config.capacity else ()
    order = torch.arange(tokens).expand(heads, -1)  # [Hkv, S]
    if rounds and config.schedule.n_exact:
        known = (state.queries[0, layer], state.last_queries[0, layer])
        order = clustering.apart_order(keys, values, degree, *known, config.schedule)
    keys = keys.gather(1, order[:, :, None].expand(-1, -1, dim))
    one_hot = F.pad(torch.eye(tokens), (0, -tokens % dim))[order]  # [Hkv, S, S and some]
    shares = []
    for some in one_hot.split(dim, dim=2):  # values have the size of keys
        _, mean, degree = clustering.compress(keys, some, torch.ones(heads, tokens), rounds, config.schedule)
        shares.append(mean * degree[:, :, None])
    member = torch.cat(shares, dim=2)[:, :, :tokens].round()  # [Hkv, n, S] 1 where a token is in a slot
    if not (member.sum(dim=1) == 1).all():
        raise RuntimeError("a token was found in no slot, or in several")
    return Clusters(member.argmax(dim=1), degree)


def summary(tokens: list[str], slot: Tensor, degree: Tensor) -> str:
    """How large the clusters of one head are, and the largest: slot [S], degree [n]."""
    bounds = [0, *COLOURS]
    rows = []
    for low, high in zip(bounds, COLOURS, strict=False):
        inside = degree[(degree > low) & (degree <= high)]
        rows.append([span(low, high), len(inside), int(inside.sum()), f"{inside.sum() / len(tokens):.1%}"])
    largest = []
    for index in degree.argsort(descending=True, stable=True)[:SHOWN_CLUSTERS].tolist():
        members = (slot == index).nonzero()[:, 0].tolist()
        words = " ".join(repr(tokens[token]) for token in members[:SHOWN_MEMBERS])
        more = f" and {len(members) - SHOWN_MEMBERS} more" if len(members) > SHOWN_MEMBERS else ""
        largest.append(f"  {len(members)} tokens, from {members[0]} to {members[-1]}: {words}{more}")
    heads = ["tokens in a slot", "slots", "tokens", "share of tokens"]
    table = tabulate(rows, headers=heads, tablefmt="github", disable_numparse=True)
    return "\n".join([table, "", "largest:", *largest])


def span(low: int, high: int) -> str:
    """The degrees of one colour: more than `low`, up to `high`."""
    if high == 1 << 30:
        return f"{low + 1}+"
    return str(high) if high == low + 1 else f"{low + 1}-{high}"


def page(title: str, text: str, tokens: list[str], slot: Tensor, degree: Tensor) -> str:
    """The tokens of a text as HTML, coloured by the degree of their slots: slot [S], degree [n]."""
    kinds = torch.bucketize(degree, torch.tensor(list(COLOURS))).tolist()  # of each slot: the index of its colour
    spans = [
        f'<span class="d{kinds[index]}" data-slot="{index}" data-token="{number}">{html.escape(token)}</span>'
        for number, (token, index) in enumerate(zip(tokens, slot.tolist(), strict=True))
    ]
    names = [span(low, high) for low, high in zip([0, *COLOURS], COLOURS, strict=False)]
    return PAGE.format(
        title=html.escape(title),
        summary=html.escape(text),
        colours="\n".join(f".d{kind} {{ background: {colour}; }}" for kind, colour in enumerate(COLOURS.values())),
        legend=" ".join(f'<b class="key d{kind}">{name}</b>' for kind, name in enumerate(names)),
        tokens="".join(spans),
    )


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, run the model, print the summary, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=SMOLLM2, help="hub id, folder or GGUF file (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of text (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=256, help="slots per KV head (default: %(default)s)")
    parser.add_argument("--layer", type=int, help="clustered layer to show (default: the middle one)")
    parser.add_argument("--head", type=int, default=0, help="KV head to show (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the page (default: %(default)s)")
    args = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()

    original, tokenizer = load_model(args.model)
    model = ckv_compile.transform(original, budget=args.budget, compile="eager")
    shape, config = model.cache_shape, model.ckv_config
    layer = shape.layers // 2 if args.layer is None else args.layer
    for name, value, count in (("--layer", layer, shape.layers), ("--head", args.head, shape.kv_heads)):
        if not 0 <= value < count:
            parser.error(f"{name} {value}: this model has clustered ones from 0 to {count - 1}")
    if args.tokens < config.capacity:
        parser.error(f"--tokens {args.tokens}: nothing is merged below budget + interval = {config.capacity}")
    ids = text_of(tokenizer, args.tokens)
    clusters, degrees = find_clusters(model, ids, layer)
    slot, degree = clusters.slot[args.head], clusters.degree[args.head]
    tokens = [decode(tokenizer, token) for token in ids[0].tolist()]
    alone = (degrees == 1).sum().item() / (shape.layers * shape.kv_heads * args.tokens)
    title = f"{args.tokens} tokens in {len(degree)} slots: layer {layer}, KV head {args.head}"
    text = (
        f"{len(config.schedule.rounds(args.tokens))} rounds; the first {config.n_sink} and the last {config.n_recent} "
        f"tokens are never merged. In all layers and heads {alone:.1%} of the tokens stay alone, in this one "
        f"{(degree == 1).sum().item() / args.tokens:.1%}."
    )
    print(title, text, summary(tokens, slot, degree), sep="\n\n")
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "clusters.html"
    file.write_text(page(title, text, tokens, slot, degree), encoding="utf-8")
    print(f"\n{file}")


def decode(tokenizer: Any, token: int) -> str:
    """The text of one token."""
    return str(tokenizer.decode([token]))


if __name__ == "__main__":
    main()
