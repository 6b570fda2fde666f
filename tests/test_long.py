"""Contexts without end: prompts in chunks of bounded memory, and generations that never stop."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import cache_of, reference_logits, tiny_model
from transformers.generation.streamers import BaseStreamer

import ckv_compile

SMALL = {"budget": 40, "interval": 16, "n_sink": 2, "n_recent": 6, "chunk_size": 16}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("chunk", [7, 32, 64, 300])
@torch.no_grad()
def test_a_prompt_in_chunks_is_a_run_of_the_reference_in_chunks(family, chunk, prompt):
    model = tiny_model(family).double()
    ours = ckv_compile.transform(model, compile="eager", prefill_chunk=chunk, **SMALL)
    found = ours.generate(
        prompt(200), max_new_tokens=25, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    expected, _ = reference_logits(model, ours.ckv_config, prompt(200), 25, chunk)
    torch.testing.assert_close(torch.stack(found.logits), expected.float(), atol=1e-5, rtol=1e-5)
    assert int(cache_of(found).state.position) == 224


def test_a_prompt_within_the_budget_is_the_same_in_chunks(prompt):
    model = tiny_model()
    ours = ckv_compile.transform(model, compile="eager", budget=200, prefill_chunk=33)
    ids, mask = prompt(150, batch=2), torch.ones(2, 150, dtype=torch.int64)
    ids[0, :60], mask[0, :60] = 0, 0  # chunks begin behind the padding
    options = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False}
    assert torch.equal(ours.generate(ids, **options), model.generate(ids, **options))


def test_options_that_would_not_do_what_they_say_are_refused(prompt):
    ours = ckv_compile.transform(tiny_model(), compile="eager", budget=200)
    with pytest.raises(ckv_compile.InputError, match=r"prefill_chunk_size=32 .* pass prefill_chunk= to transform\(\)"):
        ours.generate(prompt(100), max_new_tokens=9, prefill_chunk_size=32)
    with pytest.raises(ckv_compile.InputError, match="progress=5: pass True, False, or a function"):
        ours.generate(prompt(100), max_new_tokens=9, progress=5)


def test_a_long_prefill_tells_how_far_it_is(prompt, capsys):
    ours = ckv_compile.transform(tiny_model(), compile="eager", prefill_chunk=32, **SMALL)
    ids, mask = prompt(100, batch=2), torch.ones(2, 100, dtype=torch.int64)
    mask[1, :60] = 0
    told = []
    ours.generate(ids, attention_mask=mask, max_new_tokens=3, progress=lambda done, total: told.append((done, total)))
    assert told == [(done, 140) for done in (32, 64, 96, 100, 132, 140)]
    capsys.readouterr()
    ours.generate(prompt(100), max_new_tokens=3, progress=True)
    assert "prefill: 100%" in capsys.readouterr().err
    ours.generate(prompt(100), max_new_tokens=3)
    assert capsys.readouterr().err == ""


PEAK = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import tiny_model
import ckv_compile
chunk, short, long = eval(sys.argv[2])
ours = ckv_compile.transform(tiny_model(), budget=256, compile="eager", prefill_chunk=chunk)
peaks = []
for length in (short, short, long):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    ours(torch.arange(length)[None] % 128)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    peaks.append(int(peak.split()[1]) / 1024)
print(peaks[2] - peaks[1])
"""


def test_memory_of_a_prompt_in_chunks_does_not_depend_on_its_length():
    """Peak of the process, MiB beyond that of an eighth of the prompt: 32k tokens in chunks, and 16k at once."""

    def growth(chunk, short, long):
        arguments = [str(Path(__file__).parent), repr((chunk, short, long))]
        run = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=True)
        return float(run.stdout.split()[-1])

    assert growth(512, 4096, 32768) < 8
    assert growth(None, 2048, 16384) > 16  # what it would be without; 29 to 46, as the allocator keeps what it has


def test_sixty_thousand_tokens_leave_memory_flat_and_the_accounts_true():
    """Far beyond the 512 positions of the model's config, around the window again and again."""
    options = {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 16, "intermediate_size": 16}
    kinds = ["sliding_attention", "full_attention"]
    model = tiny_model("gemma3", num_hidden_layers=2, layer_types=kinds, **options)
    ours = ckv_compile.transform(model, budget=128, interval=64, n_recent=6, chunk_size=32)
    peaks = []

    class Watch(BaseStreamer):
        count = 0

        def put(self, value):
            self.count += 1
            if self.count in (6_000, 60_000):
                peaks.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)

        def end(self):
            pass

    cache = ours.new_cache()
    tokens = ours.generate(
        torch.tensor([[1, 2, 3]]), past_key_values=cache, max_new_tokens=60_000, do_sample=False, streamer=Watch()
    )
    assert tokens.shape == (1, 60_003)
    assert peaks[1] - peaks[0] < 2 * 2**20  # 40 bytes a token would be more
    assert int(cache.state.position) == cache.get_seq_length() == 60_002
    assert (cache.state.degree.double().sum(dim=-1) == 60_002).all()
    assert all(torch.isfinite(tensor).all() for tensor in cache.state)
    assert torch.isfinite(ours(tokens[:, -1:], past_key_values=cache).logits).all()


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_end_where_the_model_says(family, prompt):
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64}
    if family == "opt":
        own = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "ffn_dim": 48}
        own |= {"word_embed_proj_dim": 48, "max_position_embeddings": 64}
    nothing = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=128, **own, **nothing)).eval()
    ours = ckv_compile.transform(model, budget=100, compile="eager")
    last = ours.generate(prompt(60), max_new_tokens=5, do_sample=False)  # the last token has position 64: not fed back
    assert torch.equal(last, model.generate(prompt(60), max_new_tokens=5, do_sample=False))
    for call in (
        lambda: ours.generate(prompt(60), max_new_tokens=6),
        lambda: ours.generate(prompt(65), max_new_tokens=1),
        lambda: ours(prompt(65)),
        lambda: ours(prompt(1), past_key_values=cache_of(ours(prompt(64)))),
    ):
        with pytest.raises(ckv_compile.InputError, match="65 tokens in a row; this model has positions for 64"):
            call()
    turn = {"attention_mask": torch.ones(1, 60, dtype=torch.int64), "past_key_values": cache_of(ours(prompt(50)))}
    with pytest.raises(ckv_compile.InputError, match="65 tokens in a row"):  # and the cache is as it was
        ours.generate(prompt(10), max_new_tokens=6, **turn)
    assert ours.generate(prompt(10), max_new_tokens=5, **turn).shape == (1, 15)
    mask = torch.ones(1, 70, dtype=torch.int64)
    mask[:, :10] = 0  # padding takes no position
    assert ours.generate(prompt(70), attention_mask=mask, max_new_tokens=5).shape == (1, 75)
