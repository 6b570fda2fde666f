"""A second kind of model: a small Qwen3 that is trained to recall, and what compressing its cache costs it.

    python demos/small_model.py

A record is a key and two values. Records stand between noise, and the model says the values of a key that comes again.
It learns that from random weights on one CPU thread. Then each method compresses the cache of held-out prompts, as
`ckv eval` does. A model whose full cache does not recall tells no methods apart, and the tables say so.
"""

import argparse
import itertools
import random
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from ckv_compile import render
from ckv_compile.evaluation.candidates import candidate
from ckv_compile.evaluation.harness import PROTOCOLS, choose
from ckv_compile.evaluation.session import Session
from ckv_compile.evaluation.tasks import Prompt, Sample

TASK = "records"
KEYS = 24  # and as many first values, and second ones: each have tokens of their own
NOISE = 16
WIDTH = 3  # tokens of a record
VOCABULARY = WIDTH * KEYS + NOISE

METHODS = (
    *("ours", "ours:exact=0.0,r_init=0.25", "streaming", "h2o", "snapkv", "tova", "keydiff", "expected-attention"),
    *("kmeans", "d2o"),
)
BUDGETS = (0.5, 0.25, 0.125)
SHORTEST = 304  # tokens of a prompt: an eighth of them holds the 36 that are protected, and a pair to merge
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
HELD_OUT = 10_000  # the first seed of the prompts

TOKENS = 2048  # of a batch
RATE, NORM_RATE, WARM_UP = 2e-3, 1e-2, 50  # learning rates, of weights and of norms, and steps until they are reached
LEARNT = 0.97  # accuracy that ends a stage
CHECKED = 50  # steps that it is a mean of


class Stage(NamedTuple):
    """What the model learns next, until it can do it."""

    records: int  # of a sequence
    gap: int  # tokens of noise before each, on average
    length: int  # tokens of a sequence


STAGES = (Stage(4, 0, 48), Stage(8, 1, 64), Stage(16, 2, 160), Stage(16, 8, 320), Stage(16, 20, 640))


class Words:
    """Says tokens: `k`, `a` and `b` of a record, `n` of noise, with their numbers."""

    eos_token_id = None

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        """The words of some tokens, none of which is special."""
        return " ".join(f"{'kabn'[token // KEYS]}{token % KEYS:02}" for token in tokens)


def build(seed: int) -> Qwen3ForCausalLM:
    """An untrained model, whose weights begin near what recall needs: from elsewhere they take many times as long.

    Queries and keys of a layer begin equal, and what a head writes as what it reads, so that a token attends to what is
    like it, or to what has seen such a token. All embeddings share a part, by which a head can attend to a distance.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight += config.initializer_range * torch.randn(config.hidden_size)
        for layer in model.model.layers:
            own = layer.self_attn
            keys, values = (  # [heads * D, hidden], repeated for the query heads of each KV head
                part.weight.view(2, 1, 32, 128).expand(2, 2, 32, 128).reshape(128, 128)
                for part in (own.k_proj, own.v_proj)
            )
            own.q_proj.weight.copy_(keys)
            own.o_proj.weight.copy_(values.T)
    return model


def sequences(stage: Stage, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random tokens [rows, length] int64, and of the same shape the values of keys that came before, elsewhere -100.

    Every record comes once, and then any of them again and again. In a fixed order, or in rounds, the last of a round
    could be told without reading its key.
    """
    count = -(-stage.length // WIDTH)  # records that fit without noise
    parts = [torch.rand(rows, KEYS, generator=generator).argsort(dim=1)[:, : stage.records] for _ in range(WIDTH)]
    records = torch.stack([part + i * KEYS for i, part in enumerate(parts)], dim=2)  # [rows, records, WIDTH]
    again = torch.randint(stage.records, (rows, max(0, count - stage.records)), generator=generator)
    order = torch.cat([torch.arange(stage.records).expand(rows, -1), again], dim=1)[:, :count]
    gaps = torch.randint(2 * stage.gap + 1, (rows, count), generator=generator)
    starts = (gaps + WIDTH).cumsum(dim=1) - WIDTH
    noise = torch.randint(NOISE, (rows, int(starts.max()) + WIDTH), generator=generator)
    ids = WIDTH * KEYS + noise
    wanted = torch.full_like(ids, -100)
    for i in range(WIDTH):
        said = records[:, :, i].gather(1, order)
        ids.scatter_(1, starts + i, said)
        if i:
            wanted.scatter_(1, starts[:, stage.records :] + i, said[:, stage.records :])
    return ids[:, : stage.length], wanted[:, : stage.length]


def train(model: Qwen3ForCausalLM, seed: int, steps: int) -> None:
    """Train in place, stage by stage; print what each came to.

    Beside the values, the first layer learns to know the token before each, which a linear map of its output is to say:
    the second layer needs that, and would take thousands of steps to bring it about.

    Args:
        model: of `build`.
        seed: of the sequences.
        steps: of a stage at most; the last one takes them all, with a rate that falls to zero.
    """
    generator = torch.Generator().manual_seed(seed)
    before = nn.Linear(model.config.hidden_size, VOCABULARY)
    parameters = [*model.parameters(), *before.parameters()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for each in parameters if each.ndim > 1], "rate": RATE},
            {"params": [each for each in parameters if each.ndim == 1], "rate": NORM_RATE, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        weight_decay=0.05,
    )
    start, done = time.perf_counter(), 0
    for stage in STAGES:
        found: list[float] = []
        while len(found) < steps and not (stage != STAGES[-1] and mean(found) >= LEARNT):
            falling = 1 - len(found) / steps if stage == STAGES[-1] else 1.0
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * min(1.0, (done + 1) / WARM_UP) * falling
            ids, wanted = sequences(stage, max(1, TOKENS // stage.length), generator)
            output = model.model(ids, output_hidden_states=True)
            asked = wanted[:, 1:] >= 0
            logits, answers = model.lm_head(output.last_hidden_state[:, :-1][asked]), wanted[:, 1:][asked]
            said = before(output.hidden_states[1][:, 1:])
            loss = F.cross_entropy(logits, answers) + F.cross_entropy(said.flatten(0, 1), ids[:, :-1].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            found.append((logits.argmax(dim=-1) == answers).float().mean().item())
            done += 1
        print(
            f"[{time.perf_counter() - start:5.1f} s] {stage.records} records in {stage.length} tokens: "
            f"{sum(found[-CHECKED:]) / len(found[-CHECKED:]):.1%} after {len(found)} steps",
            flush=True,
        )


def mean(found: list[float]) -> float:
    """The mean of the last accuracies; 0 while there are too few."""
    return sum(found[-CHECKED:]) / CHECKED if len(found) >= CHECKED else 0.0


def prompt(length: int, depth: float, seed: int) -> Prompt:
    """Records between noise, and the key of one of them, which stands at the depth: as many records as in training."""
    rng = random.Random(f"{TASK} {seed}")
    parts = [rng.sample(range(i * KEYS, (i + 1) * KEYS), STAGES[-1].records) for i in range(WIDTH)]
    first, *others = ([*record] for record in zip(*parts, strict=True))
    noise = length - 1 - WIDTH * STAGES[-1].records
    pieces = [*others, *([WIDTH * KEYS + rng.randrange(NOISE)] for _ in range(noise))]
    rng.shuffle(pieces)
    pieces.insert(round(depth * len(pieces)), first)
    key, *values = first
    answer = Words().decode(values, skip_special_tokens=True)
    return Prompt(TASK, length, depth, seed, Sample([*itertools.chain(*pieces)], [key], (answer,), len(values)))


def load(folder: Path | None, seed: int, steps: int) -> PreTrainedModel:
    """The model that was saved in a folder; or a new one, which is trained and saved there."""
    if folder is not None and (folder / "config.json").is_file():
        return Qwen3ForCausalLM.from_pretrained(folder).eval()
    model = build(seed)
    train(model, seed, steps)
    if folder is not None:
        model.save_pretrained(folder)
    return model.eval()


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, train, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the trained model, which is made if it is not there")
    parser.add_argument("--seed", type=int, default=0, help="of weights and training (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="of a training stage at most (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=100, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file for the outcomes, as of ckv eval; written anew")
    args = parser.parse_args(arguments)
    if args.length < SHORTEST or args.prompts < 1 or args.steps < 1:
        parser.error(f"--length must be at least {SHORTEST}, --prompts and --steps at least 1")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    model = load(args.model, args.seed, args.steps)
    name = f"a Qwen3 of {model.config.num_hidden_layers} layers trained on recall (demos/small_model.py)"
    chosen = choose([candidate(method) for method in METHODS], BUDGETS)
    depths = itertools.islice(itertools.cycle(DEPTHS), args.prompts)
    prompts = [prompt(args.length, depth, HELD_OUT + i) for i, depth in enumerate(depths)]
    if args.out is not None:
        args.out.unlink(missing_ok=True)  # of other weights, which a file does not tell apart
    with render.bar("prompts") as show:
        found = Session(name, model, Words(), chosen, {}, args.out).ask(prompts, PROTOCOLS, show)
    print()
    render.scores([row for row in found["rows"] if row["task"] == TASK])


if __name__ == "__main__":
    main()
