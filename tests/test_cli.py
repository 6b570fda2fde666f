"""Every command on a tiny model in a folder: what it prints, its JSON, its exit codes and its errors."""

import io
import json
import logging
import random
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import VOCABULARY, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import ckv_compile
from ckv_compile import cli
from ckv_compile.chat import Conversation, generate_on
from ckv_compile.errors import InputError

TEMPLATE = (
    "{% for message in messages %} <{{ message['role'] }}> {{ message['content'] }} <end>{% endfor %}"
    "{% if add_generation_prompt %} <assistant>{% endif %}"
)
FORGETFUL = "{% for message in messages[-1:] %} <user> {{ message['content'] }}{% endfor %} <assistant>"
CACHE = ("--budget", "64", "--interval", "8")
EAGER = (*CACHE, "--compile", "eager")


def tiny_tokenizer(template=TEMPLATE):
    """A token a word, so that a text and its tokens are the same thing."""
    words = ["<unk>", "<end>", "<user>", "<assistant>", "<system>"]
    words += [f"w{i}" for i in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", chat_template=template)


@pytest.fixture(autouse=True, scope="module")
def _log_level():
    """Commands set how much is logged in a process, which is their own otherwise."""
    log = logging.getLogger("ckv_compile")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a tiny model with a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def truncated(tiny, tmp_path_factory):
    """The folder of that model, whose weights end too early: what reads them fails."""
    folder = tmp_path_factory.mktemp("truncated")
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return str(folder)


@pytest.fixture(scope="module")
def compiled():
    """That model, transformed with the options of CACHE."""
    return ckv_compile.transform(tiny_model(), budget=64, interval=8, compile="eager")


@pytest.fixture
def loaded(compiled, monkeypatch):
    """Commands get it without transforming it again; call it to give it another chat template."""

    def use(template=TEMPLATE):
        monkeypatch.setattr(cli, "_load", lambda *arguments, **options: (compiled, tiny_tokenizer(template)))

    use()
    return use


@pytest.fixture(scope="module")
def artifact(tiny, tmp_path_factory):
    """The folder of the artifact of that model."""
    folder = str(tmp_path_factory.mktemp("artifacts") / "out")
    result = ckv("export", tiny, folder, *CACHE, "--json")
    assert result.exit_code == 0, result.stderr
    return folder, json.loads(result.stdout)


def ckv(*arguments, stdin=None):
    """Run a command as a shell would, in this process."""
    return CliRunner().invoke(cli.app, list(map(str, arguments)), input=stdin)


def words(count, seed=0):
    """A text of as many tokens."""
    return " ".join(f"w{i}" for i in random.Random(seed).choices(range(5, VOCABULARY), k=count))


def answer(model, text, tokens):
    """What the package answers without the command line."""
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text, return_tensors="pt").input_ids
    return tokenizer.decode(model.generate(ids, max_new_tokens=tokens)[0, ids.shape[1] :], skip_special_tokens=True)


def test_help_is_instant_and_says_what_there_is():
    code = (
        "import sys\nfrom ckv_compile.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print(sorted({'torch', 'transformers'} & {*sys.modules}))"
    )
    for arguments in (["--help"], ["generate", "--help"]):
        found = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert found.stdout.endswith("[]\n")
        assert "budget" in found.stdout


def test_every_field_of_the_config_has_an_option_with_a_help():
    assert set(cli._field_helps()) == set(ckv_compile.CKVConfig.__dataclass_fields__)
    assert all(cli._field_helps().values())


@pytest.mark.parametrize("source", ["argument", "file", "stdin", "file and argument"])
def test_generate_streams_the_answer_to_the_prompt(source, compiled, loaded, tmp_path):
    text = words(100)
    file = tmp_path / "prompt.txt"
    file.write_text(text if source == "file" else text[: text.rindex(" ")])
    given = {
        "argument": ([text], None),
        "file": (["--file", file], None),
        "stdin": (["-"], text),
        "file and argument": ([text[text.rindex(" ") + 1 :], "--file", file], None),
    }
    arguments, stdin = given[source]
    result = ckv("generate", "tiny", *arguments, "--no-chat", "--max-new-tokens", 12, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == answer(compiled, text, 12)
    assert "100 tokens read" in result.stderr
    assert "12 generated" in result.stderr


def test_generate_prints_one_json_document(tiny, compiled):
    result = ckv("generate", tiny, words(90), "--system", "w5", *EAGER, "--max-new-tokens", 10, "--json")
    document = json.loads(result.stdout)
    assert document["text"] == answer(compiled, f"<system> w5 <end> <user> {words(90)} <end> <assistant>", 10)
    assert (document["prompt_tokens"], document["tokens"], document["budget"]) == (96, 10, 64)
    assert document["cache_bytes"] == 3 * 3 * ((64 + 8) * (2 * 8 * 4 + 4) + 2 * 8 * 4)
    assert document["seed"] is None


def test_sampling_repeats_with_its_seed(loaded):
    def sampled(*seed):
        run = ckv(
            "generate", "tiny", words(20), "--max-new-tokens", 20, "--temperature", 1.5, "--top-p", 0.9, "--json", *seed
        )
        return json.loads(run.stdout)

    first, again = sampled("--seed", 3), sampled("--seed", 3)
    assert (first["text"], first["seed"]) == (again["text"], 3)
    assert sampled()["text"] != sampled()["text"]


def test_a_chat_reads_only_what_is_new_and_can_be_kept(compiled, loaded, tmp_path):
    file = tmp_path / "talk"
    kept = ["/stats", f"/save {file}", "/reset", "/stats", f"/load {file}", "/stats"]
    script = ["w7 w8", "w9", *kept, "w10", "/exit", "not read"]
    result = ckv("chat", "tiny", "--max-new-tokens", 6, "--system", "w5 w6", stdin="\n".join(script))
    assert result.exit_code == 0, result.stderr
    talk = Conversation(compiled, tiny_tokenizer(), "w5 w6")
    turns = [talk.turn(text, max_new_tokens=6) for text in ("w7 w8", "w9", "w10")]
    assert result.stdout.splitlines() == [turn.reply for turn in turns]
    # <system> w5 w6 <end> <user> w7 w8 <end> <assistant>; then the end of a reply, <end> <user> w9 <end> <assistant>
    assert [turn.prefilled for turn in turns] == [9, 6, 6]
    read = [line for line in result.stderr.splitlines() if "tokens read" in line]
    assert [int(line.split()[0]) for line in read] == [9, 6, 6]
    stats = [line for line in result.stderr.splitlines() if "slots" in line]
    assert stats[0] == stats[2] == "5 messages, 25 tokens in 25 of 72 slots, 49.2 KB"
    assert stats[1].startswith("1 messages, 0 tokens in 0 of 72 slots")


def test_a_template_that_rewrites_earlier_turns_starts_the_cache_again(compiled):
    talk = Conversation(compiled, tiny_tokenizer(FORGETFUL))
    first, second = (talk.turn("w5 w6", max_new_tokens=4) for _ in range(2))
    assert not first.restarted
    assert second.restarted
    assert (second.reply, second.prefilled) == (first.reply, first.prefilled)
    assert talk.cache.get_seq_length() == 4 + 3


class Failing:
    """A streamer that fails at one of its calls: the first is the prompt's, each other one a token's."""

    def __init__(self, call):
        self.left = call

    def put(self, tokens):
        self.left -= 1
        if not self.left:
            raise OSError("no space left")

    def end(self):
        raise OSError("no space left")


def interrupt(done, total):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "call",
    [None, 1, 2, 5, 99],
    ids=["in the prefill", "before it", "at the first token", "at a later one", "at the end"],
)
@pytest.mark.parametrize("saved", [False, True], ids=["", "saved and loaded"])
def test_a_turn_after_one_that_failed_is_as_if_that_had_not_been(call, saved, compiled, tmp_path):
    talk, fresh = (Conversation(compiled, tiny_tokenizer()) for _ in range(2))
    first, second = (fresh.turn(text, max_new_tokens=6) for text in ("w7 w8", "w9 w10"))
    assert talk.turn("w7 w8", max_new_tokens=6) == first
    options = {"streamer": Failing(call)} if call else {"progress": interrupt}
    with pytest.raises((OSError, KeyboardInterrupt)):
        talk.turn("w20 w21", max_new_tokens=6, **options)  # as long as the next turn, and of other words
    if saved:
        talk.save(tmp_path / "talk")
        talk.load(tmp_path / "talk")
    assert talk.turn("w9 w10", max_new_tokens=6).reply == second.reply
    assert (talk.messages, talk.tokens) == (fresh.messages, fresh.tokens)


def test_a_turn_that_fails_before_it_reads_anything_costs_nothing(compiled):
    talk = Conversation(compiled, tiny_tokenizer())
    talk.turn("w7 w8", max_new_tokens=6)
    with pytest.raises(InputError, match="num_beams"):
        talk.turn("w9", max_new_tokens=6, num_beams=2)
    assert not talk.turn("w9", max_new_tokens=6).restarted


def test_a_turn_that_the_cache_has_read_already_starts_it_again(compiled):
    talk = Conversation(compiled, tiny_tokenizer(FORGETFUL))
    first, second = (talk.turn("w5 w6", max_new_tokens=1) for _ in range(2))
    assert (second.reply, second.prefilled) == (first.reply, first.prefilled)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"/load missing", "ckv: there is no file"),
        (b"/save", "'/save' is no command; there are /reset, /save FILE"),
        (b"/what", "'/what' is no command"),
        (b"w7 \xff", "ckv: this line is no text in utf-8 (invalid start byte at byte 3)"),
        (b"w7 w9", "ckv: refused once"),
    ],
    ids=["missing file", "no file", "unknown", "no text", "failed turn"],
)
def test_a_chat_goes_on_after_an_error(line, message, compiled, loaded, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    errors = [InputError("refused\nonce")] * (line == b"w7 w9")

    def failing(*arguments, **options):
        if errors:
            raise errors.pop()
        return generate_on(*arguments, **options)

    monkeypatch.setattr("ckv_compile.chat.generate_on", failing)
    result = ckv("chat", "tiny", "--max-new-tokens", 6, stdin=line + b"\nw7 w8\n")
    assert result.exit_code == 0, result.output
    assert message in result.stderr
    assert result.stdout.strip() == Conversation(compiled, tiny_tokenizer()).turn("w7 w8", max_new_tokens=6).reply


@pytest.mark.parametrize(
    "typed", ["w7 \udcff", UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")], ids=["let through", "refused"]
)
def test_a_line_of_a_terminal_that_is_no_text_is_passed_over(typed, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", Mock(side_effect=[typed, "w8 ", EOFError]))
    assert [cli._line() for _ in range(3)] == ["", "w8", None]
    assert capsys.readouterr().err.startswith("ckv: ")


@pytest.mark.parametrize(
    "damage",
    [
        lambda talk: "not json",
        lambda talk: b"\xff",
        lambda talk: "[]",
        lambda talk: json.dumps({name: talk[name] for name in ("messages", "tokens")}),
        lambda talk: json.dumps(talk | {"tokens": 3}),
        lambda talk: json.dumps(talk | {"tokens": [str(token) for token in talk["tokens"]]}),
        lambda talk: json.dumps(talk | {"tokens": talk["tokens"][:-1]}),
        lambda talk: json.dumps(talk | {"messages": {"role": "user", "content": "w5"}}),
        lambda talk: json.dumps(talk | {"messages": ["w5"]}),
        lambda talk: json.dumps(talk | {"messages": [{"role": 1, "content": "w5"}]}),
        lambda talk: json.dumps(talk | {"cache": None}),
        lambda talk: json.dumps(talk | {"cache": "0" * 64}),
    ],
    ids=[
        "no JSON",
        "no text",
        "no object",
        "a field less",
        "number of tokens",
        "tokens as text",
        "a token less",
        "one message",
        "texts",
        "a role of another type",
        "no digest",
        "another cache",
    ],
)
def test_a_conversation_of_another_cache_is_refused_and_nothing_is_lost(damage, compiled, tmp_path):
    talk = Conversation(compiled, tiny_tokenizer())
    talk.turn("w5", max_new_tokens=4)
    talk.save(tmp_path / "talk")
    file = tmp_path / "talk.json"
    damaged = damage(json.loads(file.read_text()))
    file.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    before = talk.cache, talk.messages, talk.tokens
    with pytest.raises(InputError, match=r"talk\.json"):
        talk.load(tmp_path / "talk")
    assert before == (talk.cache, talk.messages, talk.tokens)


def test_two_conversations_of_one_length_are_told_apart(compiled, tmp_path):
    talk = Conversation(compiled, tiny_tokenizer())
    for name in ("one", "other"):
        talk.reset()
        talk.turn(f"w5 {'w6' if name == 'one' else 'w7'}", max_new_tokens=4)
        talk.save(tmp_path / name)
    (tmp_path / "other").replace(tmp_path / "one")
    with pytest.raises(InputError, match=r"one\.json is not the conversation of"):
        talk.load(tmp_path / "one")


def test_a_save_that_fails_leaves_the_earlier_one(compiled, tmp_path, monkeypatch):
    talk = Conversation(compiled, tiny_tokenizer())
    talk.turn("w5", max_new_tokens=4)
    talk.save(tmp_path / "talk")
    before = talk.messages, talk.tokens
    talk.turn("w6", max_new_tokens=4)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda *arguments, **options: Failing(1).end())
        with pytest.raises(OSError, match="no space left"):
            talk.save(tmp_path / "talk")
    assert {file.name for file in tmp_path.iterdir()} == {"talk", "talk.json"}
    talk.load(tmp_path / "talk")
    assert before == (talk.messages, talk.tokens)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        talk.save(tmp_path / "missing" / "talk")


def test_inspect_counts_layers_passes_and_bytes(tmp_path):
    model = tiny_model("gemma3")
    model.save_pretrained(tmp_path)  # no tokenizer: none is needed
    result = ckv("inspect", tmp_path, "--budget", "25%", "--budget", "100", "--interval", "8", "--json")
    document = json.loads(result.stdout)
    assert document["class"] == "Gemma3ForCausalLM"
    assert document["groups"] == [
        {"kind": "clustered", "layers": 1, "kv_heads": 3, "head_dim": 16},
        {"kind": "sliding window", "layers": 2, "kv_heads": 3, "head_dim": 16, "window": 20},
    ]
    assert {each["name"]: each["matches"] for each in document["passes"]} == {
        "freeze_rotary": 0,
        "canonicalize_attention": 3,
        "insert_cached_attention": 3,
        "slice_logits": 1,
        "insert_compaction": 1,
    }
    ring, slot, token = 2 * 3 * 20 * 2 * 16 * 4, 3 * (2 * 16 * 4 + 4), 3 * 2 * 16 * 4
    queries = 3 * (2 + 8 * 2) * 16 * 4  # two means, and the last 8 of two heads
    assert document["row_bytes"] == [
        {
            "context": 512,
            "full": 512 * token + 2 * 19 * token,
            "budgets": {
                name: ring + (slots + 8) * slot + queries for name, slots in (("25%", 128), ("100 slots", 100))
            },
        }
    ]


def test_inspect_prints_tables(tiny, compiled, monkeypatch):
    monkeypatch.setattr("ckv_compile.model.transform", lambda model, **options: compiled)
    table = ckv("inspect", tiny, "--budget", "50%", "--budget", "1024").stdout
    for part in ("LlamaForCausalLM, float32", "clustered", "insert_cached_attention", "full cache", "1,024 slots"):
        assert part in table


def test_plan_is_json_a_table_and_a_picture(tiny, tmp_path):
    picture = tmp_path / "plan.png"
    arguments = ("plan", tiny, "--memory", "10MB", "--budget", 100, "--context", 256, "--context", 512, "--batch", 4)
    document = json.loads(ckv(*arguments, "--interval", 8, "--plot", picture, "--json").stdout)
    assert picture.read_bytes().startswith(b"\x89PNG")
    row = document["contexts"][1]
    assert list(row["largest_batch"]) == ["full cache", "50%", "25%", "100 slots"]
    rows = {
        name: (10_000_000 - document["weights_bytes"] - row["prefill_bytes"]) // n
        for name, n in row["row_bytes"].items()
    }
    assert row["largest_batch"] == rows
    assert document["batches"][0]["longest_context"]["50%"] > document["batches"][0]["longest_context"]["full cache"]
    table = ckv(*arguments, "--interval", 8).stdout
    assert all(name in table for name in row["largest_batch"])
    assert "largest batch" in table


def test_eval_compares_budgets_with_the_full_cache(tiny, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(words(150))
    arguments = ("eval", tiny, "--file", file, "--context", 150, "--windows", 1, "--tokens", 10, "--budget", 50)
    result = ckv(*arguments, "--method", "ours:interval=8", "--json")
    assert result.exit_code == 0, result.stderr
    full, kept = json.loads(result.stdout)["rows"]
    assert (full["budget"], full["agreement"], kept["budget"]) == (None, 1.0, 50)
    assert abs(full["kl"]) < 1e-6 < kept["kl"]


def test_calibrate_names_the_light_half(tiny, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(words(200))
    arguments = ("calibrate", tiny, "--file", file, "--context", 100, "--windows", 2, "--tokens", 10, "--share", 0.5)
    result = ckv(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    (light,), losses = document["light_layers"], document["losses"]  # of three layers
    assert min(losses, key=lambda loss: loss["kl"])["layer"] == light == int(document["option"])
    table = ckv(*arguments).stdout
    assert "one layer alone with 50 slots" in table
    assert table.splitlines()[-1] == f"--light-layers {light}"
    said = ckv("generate", tiny, words(150), "--no-chat", "--max-new-tokens", 4, "--compile", "eager", "--budget", 100,
               "--interval", 8, "--light-layers", light, "--light-share", 0.5)  # fmt: skip
    assert said.exit_code == 0, said.stderr


def test_export_writes_an_artifact_that_generates_the_same(compiled, artifact):
    folder, document = artifact
    assert document["config"]["budget"] == 64
    result = ckv("generate", folder, words(100), "--no-chat", "--max-new-tokens", 12, "--compile", "eager")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.strip() == answer(compiled, words(100), 12)


def test_inspect_reads_an_artifact(artifact):
    folder, document = artifact
    assert json.loads(ckv("inspect", folder, "--json").stdout) == document
    assert document["row_bytes"] == 3 * 3 * ((64 + 8) * (2 * 8 * 4 + 4) + 2 * 8 * 4)
    table = ckv("inspect", folder).stdout
    assert "insert_cached_attention" in table
    assert "model.safetensors" in table


@pytest.mark.parametrize(
    ("name", "said"),
    [("obstacle", "cannot be loaded here: why"), ("aot_obstacle", "compiled steps cannot be used here: why")],
)
def test_inspect_says_what_an_artifact_cannot_do_here(name, said, artifact, monkeypatch):
    folder, document = artifact
    monkeypatch.setattr("ckv_compile.artifact.describe", lambda path: {**document, "aot": [1], name: "why"})
    assert said in ckv("inspect", folder).stdout


def test_plan_takes_an_artifact(artifact):
    result = ckv("plan", artifact[0], "--memory", "1GB", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["context"] == 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--budget", "100"), "budget=100 (it has 64)"),
        (("--budget", "50%"), "budget=256 (it has 64)"),
        (("--n-sink", "2"), "n_sink=2 (it has 4)"),
        (("--dtype", "bfloat16"), "dtype=torch.bfloat16 (it has torch.float32)"),
    ],
    ids=["budget", "share", "n_sink", "dtype"],
)
def test_the_options_of_an_artifact_are_fixed(options, message, artifact):
    result = ckv("generate", artifact[0], "w5", "--compile", "eager", *options)
    assert result.exit_code == 1
    assert f"options are fixed at export, but {message} was asked for" in result.stderr


def test_the_options_of_an_artifact_may_be_said_again(artifact):
    assert ckv("generate", artifact[0], "w5", "--dtype", "float32", "--max-new-tokens", 2, *EAGER).exit_code == 0


@pytest.mark.parametrize("command", ["eval", "bench"])
def test_commands_that_compare_need_the_original_of_an_artifact(artifact, command):
    result = ckv(command, artifact[0])
    assert result.exit_code == 1
    assert "is an artifact; this needs the model that it was exported from" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "TINY", "w5"], 1, "budget is missing"),
        (["generate", "TINY", "w5", "--budget", "1.5"], 1, "budget=1.5: a float budget is a fraction of max_context"),
        (["generate", "TINY", "w5", "--budget", "64", "--interval", "40"], 1, "interval=40 is larger than"),
        (["generate", "TINY", "w5", "--budget", "100", "--device", "tpu"], 1, "device='tpu' cannot be used here"),
        (["generate", "TINY", "w5", "--budget", "100", "--compile", "fast"], 1, "compile='fast': choose one of"),
        (
            ["generate", "TINY", "--file", "missing.txt", "--budget", "64"],
            1,
            "No such file or directory: 'missing.txt'",
        ),
        (["generate", "./missing", "w5", "--budget", "100"], 1, "'./missing' could not be loaded"),
        (["generate", "missing.gguf", "w5", "--budget", "100"], 1, "there is no GGUF file missing.gguf"),
        (["generate", "TINY", "w5", "--budget", "many"], 2, "'many' is no budget: pass slots (1024)"),
        (["generate", "TINY", "w5", "--budget", "64", "--top-p", "0.5"], 2, "--top-p is for sampling"),
        (["generate", "TINY", "w5", "--budget", "64", "--no-chat", "--system", "w6"], 2, "leave --no-chat out"),
        (["generate", "TINY", "w5", "--budget", "64", "--temperature", "-1"], 2, "--temperature"),
        (["generate", "TINY", "--file", "latin1.txt", "--budget", "64"], 1, "latin1.txt is no text in utf-8"),
        (["generate", "TINY", "-", "--budget", "64"], 1, "stdin is no text in utf-8 (invalid"),
        (["eval", "TINY", "--file", "latin1.txt"], 1, "latin1.txt is no text in utf-8"),
        (["generate", "TRUNCATED", "w5", "--budget", "64", "--interval", "8"], 1, "could not be loaded (Error while"),
        (["generate", "TINY", "w5", "--budget", "nan"], 1, "budget=nan must be a finite number"),
        (["inspect", "TRUNCATED", "--budget", "nan"], 1, "budget=nan must be a finite number"),
        (
            ["inspect", "TRUNCATED", "--budget", "128", "--budget", "150%"],
            1,
            "budget=1.5: a float budget is a fraction",
        ),
        (["inspect", "TRUNCATED", "--budget", "128", "--budget", "0"], 1, "budget=0 slots cannot hold"),
        (
            ["inspect", "TRUNCATED", "--budget", "128", "--budget", "25%", "--interval", "100"],
            1,
            "interval=100 is larger",
        ),
        (["eval", "TRUNCATED", "--budget", "inf"], 1, "budget=inf must be a finite number"),
        (["eval", "TRUNCATED", "--budget", "128", "--budget", "0.5%"], 1, "budget=10 slots cannot hold"),
        (["eval", "TRUNCATED", "--context", "20"], 1, "budget=20 slots cannot hold"),
        (["export", "TRUNCATED", "out", "--budget", "64", "--max-shard-size", "5XB"], 2, "'5XB' is no size"),
        (["plan", "TINY"], 2, "--memory"),
        (["plan", "TINY", "--memory", f"{10**400}B"], 2, "is no size"),
        (["plan", "TINY", "--memory", "much"], 2, "'much' is no size: pass for example 24GB"),
        (["plan", "TINY", "--memory", "1GB", "--budget", "20"], 1, "budget=20 slots cannot hold"),
        (["plan", "TINY", "--memory", "1GB", "--plot", "plan.txt2"], 1, "--plot plan.txt2"),
        (["bench", "TRUNCATED", "--contestant", "vllm"], 2, "'vllm': choose one of dynamic, static"),
        (["bench", "TRUNCATED", "--budget", "20"], 1, "budget=20 slots cannot hold"),
        (["bench", "TRUNCATED", "--device", "tpu"], 1, "device='tpu' cannot be used here"),
        (["eval", "TINY", "--context", "99999999"], 1, "4 windows of 99,999,999 tokens in a text of"),
        (["generate"], 2, "MODEL"),
        (["tell"], 2, "No such command"),
    ],
    ids=lambda value: " ".join(value).replace("TINY ", "")[:60] if isinstance(value, list) else "",
)
def test_an_error_has_its_exit_code_and_one_paragraph(arguments, code, message, tiny, truncated, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("latin1.txt").write_bytes("w5 é w6".encode("latin-1"))
    folders = {"TINY": tiny, "TRUNCATED": truncated}
    result = ckv(*(folders.get(each, each) for each in arguments), stdin=b"w5 \xff w6" if "-" in arguments else None)
    said = " ".join(result.stderr.replace("│", " ").split())
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert message in said
    assert "Traceback" not in said
    if code == 1:
        assert result.stderr.splitlines()[-1].startswith("ckv: ")


def test_debug_shows_where_an_error_came_from(tiny):
    result = ckv("--debug", "generate", tiny, "w5")
    assert isinstance(result.exception, ckv_compile.ConfigError)


def test_a_model_without_a_chat_template_is_told_apart(loaded):
    loaded(template=None)
    plain = ckv("generate", "tiny", words(30), "--max-new-tokens", 3, "--json")
    assert json.loads(plain.stdout)["prompt_tokens"] == 30
    for command in (
        ["generate", "tiny", "w5", "--chat"],
        ["generate", "tiny", "w5", "--system", "w6"],
        ["chat", "tiny"],
    ):
        result = ckv(*command)
        assert result.exit_code == 1
        assert "chat template" in result.stderr


def test_an_interrupt_ends_with_its_own_code(tiny, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", interrupted)
    assert ckv("generate", tiny, "w5", "--budget", "64").exit_code == 130


def test_a_missing_matplotlib_is_named(tiny, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    result = ckv("plan", tiny, "--memory", "1GB", "--plot", "plan.png")
    assert result.exit_code == 1
    assert "pip install 'ckv_compile[plot]'" in result.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24 * 10**9), ("24GiB", 24 * 2**30), ("1.5 kb", 1500), ("512MiB", 2**29), ("1000", 1000), ("7B", 7)],
)
def test_sizes(text, size):
    assert cli._bytes(text) == size


@pytest.mark.real_model
def test_generate_on_the_real_model():
    result = ckv(
        "generate",
        "smollm2",
        "The capital of France is",
        "--no-chat",
        "--budget",
        1024,
        "--compile",
        "eager",
        "--max-new-tokens",
        4,
    )
    assert result.exit_code == 0, result.stderr
    assert "Paris" in result.stdout
