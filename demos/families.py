"""Every causal LM of transformers as a tiny random model: which are served, which are refused, and why.

    python demos/families.py --only llama,gemma2        # some of them, one line each
    python demos/families.py --write docs/families.md   # all of them, to the page
    python demos/families.py --json sweep.json          # keep the results, for --read sweep.json --write ...

Each family runs in a process of its own with limits on time and memory. A model agrees if, with a budget that holds
the whole text, `generate()` gives transformers' own tokens and logits.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import re
import resource
import sys
import textwrap
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import ckv_compile
from ckv_compile.errors import CKVError, PassError
from ckv_compile.ops import cached_attention, window_attention

PROMPT, NEW_TOKENS, BUDGET = 50, 30, 128
VOCABULARY = 128
TOLERANCE = 1e-3
SECONDS, BYTES = 150, 12 * 2**30
ROOT = Path(__file__).parent.parent

# What a field is set to where a config has it, whatever the family.
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim_model", "embedding_dim", "word_embed_proj_dim"), 48),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size", "emb_dim"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 6),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 6),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 6),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 3),
    **dict.fromkeys(("head_dim", "d_head", "dim_head", "kv_channels", "attention_head_size"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "dim_ff"), 96),
    **dict.fromkeys(("dff", "d_inner", "ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size"), 96),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 512),
    **dict.fromkeys(("max_target_positions", "model_max_length"), 512),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), 16),
    **dict.fromkeys(("local_attention", "attention_chunk_size", "keep_window_size"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_intermediate_size", "shared_experts_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "zero_expert_num"), 1),
    **dict.fromkeys(("initializer_range", "init_std", "embed_init_std", "initializer_factor"), 0.2),
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "hidden_size_per_layer_input": 8,
    "index_block_size": 4,
    "index_topk": 8,
    "index_topk_blocks": 2,
    "kv_lora_rank": 16,
    "num_kv_shared_layers": 2,
    "q_lora_rank": 24,
    "qk_head_dim": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "query_pre_attn_scalar": 16,
    "rotary_dim": 4,
    "v_head_dim": 8,
    "unpadded_vocab_size": VOCABULARY,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
# What these rules do not know.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 12, "mamba_d_head": 8},
    "cohere_compass_text": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        }
    },
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 3, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32},
    },
    "diffllama": {"num_key_value_heads": 2},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots3_note": {
        "audio_config": {"adapter_input_size": 48, "adapter_out_dim": 48},
        "vision_config": {"adapter_in_dim": 48, "adapter_out_dim": 48},
    },
    "gemma4": {"text_config": {"pad_token_id": 0}},
    "gemma4_unified": {"text_config": {"pad_token_id": 0}},
    "gemma4_assistant": {
        "text_config": {
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "vocab_size": VOCABULARY,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 12, "mamba_d_head": 8},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [6, 3, 6, 3]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 12, "n_groups": 4},
    "minimax_m3_vl_text": {"index_n_heads": 3, "layer_types": ["full_attention", "minimax_m3_sparse"]},
    "prophetnet": {"pad_token_id": 0},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": [16, 32], "axial_pos_embds_dim": [16, 32], "num_buckets": 4},
    "xlm": {"pad_token_id": 0},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


# What may become of a family: how the page counts it, the title of its table, and the columns.
STATUSES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "agrees": ("agree", "Served", ("family", "class", "exercises", "tested by")),
    "differs": ("differ", "Served, but not as transformers does", ("family", "class", "reason")),
    "fails": ("fail", "Neither served nor refused", ("family", "class", "reason")),
    "refused": ("are refused", "Refused", ("family", "class", "module", "reason")),
    "does not run": ("do not generate from text alone", "Not run by transformers", ("family", "class", "reason")),
    "does not build": ("do not build", "Not built", ("family", "class", "reason")),
}


# What reasons of refusals have in common.
KINDS = {
    "does not call SDPA": "attention of its own, by neither SDPA nor transformers' attention interface",
    "not a KV cache|a convolution": "layers with another state than keys and values: recurrent, or a convolution",
    "from its own cache": "positions that are counted from its own cache, not read from `position_ids`",
    r"sparse attention\?|the token ids|another path": "attention that tokens choose or bias: sparse, compressed",
    "in steps or blocks": "attention in chunks",
    "none in its masks": "a window of transformers' cache that the masks do not have",
    "could not trace": "not traceable by torch.export",
}


@dataclasses.dataclass
class Result:
    """What became of one family, and how far it got."""

    family: str
    model_class: str
    status: str = "does not build"  # of STATUSES
    steps: tuple[str, ...] = ()  # of built, ran, traced, transformed, agreed
    module: str = ""
    reason: str = ""
    exercises: tuple[str, ...] = ()
    seconds: float = 0.0


def tiny_options(config_class: type[PreTrainedConfig], own: dict[str, Any]) -> dict[str, Any]:
    """Options that make a config of a class, and the ones inside it, small; `own` has the last word."""
    types = {field.name: str(field.type) for field in dataclasses.fields(config_class)}
    known = {config_class.attribute_map.get(name, name) for name in types} | set(config_class.attribute_map)
    options = {name: value for name, value in FIELDS.items() if name in known}
    if "kv_lora_rank" in known:
        options["num_key_value_heads"] = FIELDS["num_attention_heads"]
    for i, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        if name in types:
            options[name] = None if "None" in types[name] else i
    try:
        default = config_class()
    except Exception:
        return options | own
    values = vars(default)  # some raise at getattr
    inner = {name: config for name, config in values.items() if isinstance(config, PreTrainedConfig)}
    depth = next((values[name] for name in LAYERS if name in values), None)
    lists = {n: v for n, v in values.items() if n in types and isinstance(v, list | tuple) and v and len(v) == depth}
    kinds = {name: list(dict.fromkeys(value)) if isinstance(value[0], str) else value for name, value in lists.items()}
    several = [len(each) for each in kinds.values() if isinstance(each[0], str) and len(each) > 1]
    layers = max([4, *several]) if several else 2
    options |= {name: layers for name in LAYERS if name in known}
    options |= {name: [each[i % len(each)] for i in range(layers)] for name, each in kinds.items()}
    return options | own | {name: tiny_options(type(config), own.get(name, {})) for name, config in inner.items()}


def tiny_model(family: str) -> PreTrainedModel:
    """A random model of a few layers."""
    config_class = CONFIG_MAPPING[family]
    config = config_class(**tiny_options(config_class, OWN.get(family, {})))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if not isinstance(config, model_class.config_class):  # the decoder of an encoder-decoder
        config = config.get_text_config(decoder=True)
    config.is_decoder = True
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig()  # no token ends the text
    return model


def generated(model: PreTrainedModel, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens and logits of greedy search."""
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences, torch.stack(out.logits, dim=1).float()


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two logits, as a share of the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def exercises(ours: Any, model: PreTrainedModel) -> tuple[str, ...]:
    """What a rewritten model needed beside causal attention."""
    shape, found = ours.cache_shape, []
    nodes = [node for node in ours.graph.graph.nodes if node.target in (cached_attention, window_attention)]
    if shape.window_layers:
        mixed = (
            f"{shape.window_layers} of {shape.layers + shape.window_layers} layers" if shape.layers else "all layers"
        )
        found.append(f"sliding window ({mixed})")
    schemas = {node: [argument.name for argument in node.target._schema.arguments] for node in nodes}
    given = [dict(zip(schemas[node], node.args, strict=False)) for node in nodes]
    if any(arguments.get("softcap") for arguments in given):
        found.append("score caps")
    if any(arguments.get("sinks") is not None for arguments in given):
        found.append("learned sinks")
    if any(re.search(r"experts\b", name) for name, _ in model.named_modules()):
        found.append("experts")
    if ours._rewritten.positions is not None:
        found.append("a table of positions")
    if any(node.target is torch.ops.aten.constant_pad_nd.default for call in nodes for node in call.args[:3]):
        found.append("keys and values of different sizes")
    kv_heads, heads = shape.kv_heads, {node.args[0].meta["val"].shape[1] for node in nodes}
    found.append(
        "one KV head" if kv_heads == 1 else "as many KV as query heads" if heads == {kv_heads} else "grouped heads"
    )
    return tuple(found)


def examine(result: Result, verbose: bool) -> None:
    """Take one family as far as it gets, and note that in its result."""
    try:
        model = tiny_model(result.family)
        result.steps += ("built",)
        result.status = "does not run"
        prompt = torch.randint(1, VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(0))
        expected_tokens, expected = generated(model, prompt)
        if not expected.isfinite().all():
            raise ValueError("the model's own logits are not finite")
        result.steps += ("ran",)
    except Exception as error:
        result.reason = f"{type(error).__name__}: {error}"
        if verbose:
            traceback.print_exc()
        return
    try:
        ours = ckv_compile.transform(model, budget=BUDGET, compile="eager")
        result.steps += ("traced", "transformed")
        tokens, logits = generated(ours, prompt)
    except PassError as error:
        result.steps += ("traced",)
        result.status, result.module = "refused", error.module
        result.reason = f"{error.failed_pass}: expected {error.expected}, found {error.found}"
        return
    except CKVError as error:
        result.status, result.reason = "refused", str(error)
        if re.search("does not decode|none in its masks", result.reason):
            result.steps += ("traced",)
        return
    except Exception as error:
        result.status, result.reason = "fails", f"{type(error).__name__}: {error}"
        if verbose:
            traceback.print_exc()
        return
    if torch.equal(tokens, expected_tokens) and torch.allclose(logits, expected, atol=TOLERANCE, rtol=TOLERANCE):
        result.status, result.exercises = "agrees", exercises(ours, model)
        result.steps += ("agreed",)
        return
    result.status = "differs"
    same = int((tokens == expected_tokens)[0, PROMPT:].long().cumprod(0).sum())
    steps = min(same + 1, NEW_TOKENS)
    result.reason = f"{same} of {NEW_TOKENS} tokens, logits by {difference(logits[:, :steps], expected[:, :steps]):.1%}"
    with contextlib.suppress(Exception), torch.no_grad():  # is it transformers' own cache?
        ids = expected_tokens[:, :-1]
        positions = torch.arange(ids.shape[1])[None]
        whole = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, PROMPT - 1 :].float()
        again = generated(model, prompt)[1]
        result.reason += (
            f"; without a cache transformers differs from itself by {difference(whole, expected):.1%}, "
            f"from ours by {difference(logits[:, :steps], whole[:, :steps]):.1%}; "
            f"run again by {difference(again, expected):.1%}"
        )


def worker(family: str, pipe: Any, verbose: bool) -> None:
    """The body of a child process."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    torch.set_num_threads(1)
    if not verbose:  # torch.export prints the graph of a failed trace
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
    result, start = Result(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]), time.perf_counter()
    examine(result, verbose)
    result.seconds = time.perf_counter() - start
    pipe.send(result)


def run(family: str, context: Any, verbose: bool) -> Result:
    """Examine a family in a child process, whatever becomes of it."""
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=worker, args=(family, sender, verbose), daemon=True)
    child.start()
    sender.close()
    result = Result(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], "fails", seconds=SECONDS)
    try:
        if receiver.poll(SECONDS):
            result = receiver.recv()
        else:
            result.reason = f"took more than {SECONDS} s"
    except EOFError:
        result.reason = "the process died"
    child.kill()
    child.join()
    return result


def tested_by(family: str) -> str:
    """Which test has a tiny model of the family."""
    sys.path.insert(0, str(ROOT / "tests"))
    import conftest
    import test_families

    if family in test_families.FAMILIES:
        return "`tests/test_families.py`"
    if family in {config_class.model_type for config_class, _ in conftest.FAMILIES.values()}:
        return "`tests/test_model.py`"
    return "this sweep only"


def short(reason: str) -> str:
    """An error as one cell of a table, without what varies from run to run."""
    reason = re.sub(r"^StrictDataclass\w+: .*?\n\s*", "", reason.strip())
    reason = re.sub(r"^(\w+): \s+", r"\1: ", reason)
    reason = re.split(r"\n|; ckv_compile takes| For more information|: a prefix, a block mask", reason)[0]
    reason = re.sub(r" \(logits differ by [\d.]+%\)", "", reason).replace("|", "/")
    return reason if len(reason) <= 230 else reason[:230].rsplit(" ", 1)[0] + " ..."


def kind(result: Result) -> str:
    """Why a family is refused, in general."""
    return next((title for pattern, title in KINDS.items() if re.search(pattern, result.reason)), "other")


def rows(results: list[Result], *columns: str) -> list[list[str]]:
    """Table rows of results, by the names of the columns."""
    cells = {
        "family": lambda r: f"`{r.family}`",
        "class": lambda r: r.model_class,
        "exercises": lambda r: ", ".join(r.exercises),
        "tested by": lambda r: tested_by(r.family),
        "module": lambda r: f"`{r.module}`" if r.module else "",
        "reason": lambda r: short(r.reason),
    }
    return [[cells[column](result) for column in columns] for result in results]


def table(columns: tuple[str, ...], cells: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *cells])


def page(results: list[Result]) -> str:
    """The page of a whole sweep."""
    by_status = {name: [r for r in results if r.status == name] for name in STATUSES}
    classes = len({r.model_class for r in results})
    about = (
        f"Every entry of the causal-LM mapping of transformers {transformers.__version__}, as a tiny random model "
        f"(torch {torch.__version__.partition('+')[0]}, CPU, float32), by `python demos/families.py --write "
        f"docs/families.md`. A family agrees if, after a prompt of {PROMPT} tokens, longer than its windows of "
        f"{FIELDS['sliding_window']}, greedy `generate()` of {NEW_TOKENS} tokens gives transformers' own tokens, and "
        f"logits within {TOLERANCE:g}, with budget={BUDGET}, so that nothing is merged. That says nothing about the "
        "quality of a compressed cache, nor about inputs other than text."
    )
    summary = ", ".join(f"{len(by_status[name])} {text}" for name, (text, _, _) in STATUSES.items())
    parts = [
        "# Model families",
        textwrap.fill(about, 120, break_on_hyphens=False),
        textwrap.fill(f"**{len(results)} families** ({classes} classes): {summary}.", 120, break_on_hyphens=False),
    ]
    counts = Counter(step for r in results for step in r.steps)
    meanings = {
        "built": "built from a small config",
        "ran": "generated by transformers from text alone",
        "traced": "traced by torch.export",
        "transformed": "rewritten by all passes, and through the check of `transform`",
        "agreed": "agree with transformers",
    }
    parts.append(table(("of them", "families"), [[text, str(counts[step])] for step, text in meanings.items()]))
    for name, (_, title, columns) in STATUSES.items():
        if by_status[name]:
            parts.append(f"## {title}")
            if name == "refused":
                kinds = Counter(kind(result) for result in by_status[name])
                parts.append("\n".join(f"- {count}: {text}" for text, count in kinds.most_common()))
            parts.append(table(columns, rows(by_status[name], *columns)))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Sweep, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families, with commas between")
    parser.add_argument("--read", type=Path, help="start from the results of an earlier sweep, and run --only again")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--write", type=Path, help="write the page here")
    parser.add_argument("--verbose", action="store_true", help="show warnings and tracebacks")
    arguments = parser.parse_args()
    if not arguments.verbose:
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        logging.disable(logging.WARNING)
    known = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    earlier = json.loads(arguments.read.read_text()) if arguments.read else []
    results = {each["family"]: Result(**each) for each in earlier}
    families = arguments.only.split(",") if arguments.only else [name for name in known if name not in results]
    if unknown := set(families) - set(known):
        parser.error(f"no causal LM of transformers: {', '.join(sorted(unknown))}")
    context = multiprocessing.get_context("fork")  # torch and transformers are imported once
    for i, family in enumerate(families):
        found = results[family] = run(family, context, arguments.verbose)
        detail = ", ".join(found.exercises) or f"{found.module} {short(found.reason)}".strip()
        print(f"[{i + 1}/{len(families)}] {family}: {found.status} ({found.seconds:.0f} s): {detail}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps([dataclasses.asdict(each) for each in results.values()], indent=1))
    ordered = [results[name] for name in known if name in results]
    print(", ".join(f"{count} {status}" for status, count in Counter(each.status for each in ordered).items()))
    if arguments.write:
        if len(ordered) < len(known):
            parser.error("--write needs every family: leave out --only, or --read a whole sweep")
        arguments.write.write_text(page(ordered))


if __name__ == "__main__":
    main()
