"""Saved models: the same tokens after loading, and an error for whatever is wrong with a folder."""

import contextlib
import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCABULARY, cache_of, tiny_model
from safetensors import safe_open
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

import ckv_compile
from ckv_compile import artifact
from ckv_compile.errors import ArtifactError, ConfigError

OPTIONS = {"budget": 40, "interval": 8, "n_sink": 2, "n_recent": 8, "chunk_size": 8, "compile": "eager"}
SMALL = {"num_hidden_layers": 2}
CORRUPTIONS = 200


class Decoder(nn.Module):
    """A decoder of no family: learned positions, one layer, and a head that is its embedding."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 32)
        self.positions = nn.Embedding(200, 32)
        self.qkv = nn.Linear(32, 96)

    def forward(self, input_ids, position_ids):
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        q, k, v = (part.unflatten(2, (4, 8)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=2))
        hidden = hidden + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.linear(hidden, self.tokens.weight)


def decoder():
    torch.manual_seed(0)
    return Decoder().eval()


def quantised(config):
    model = tiny_model("qwen2", hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    quantize_(model, config)
    return model


MODELS = {
    "llama, slots of 8 bits": lambda: tiny_model("llama", num_hidden_layers=1),
    "gemma3, windows, fp16": lambda: tiny_model(
        "gemma3", **SMALL, layer_types=["sliding_attention", "full_attention"]
    ).half(),
    "smollm2, tied, bf16": lambda: tiny_model("smollm2", num_hidden_layers=1).bfloat16(),
    "a decoder of one's own": decoder,
    "qwen2, int8": lambda: quantised(Int8WeightOnlyConfig(set_inductor_config=False)),
    "qwen2, int4, torchao operator": lambda: quantised(IntxWeightOnlyConfig(torch.int4, granularity=PerGroup(32))),
    "gpt-oss, transformers operator": lambda: tiny_model("gpt-oss", **SMALL),
}


def generate(model, ids, **options):
    """Tokens of greedy search in which prompts of more than 48 tokens, and 20 new ones, are compacted."""
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20, "do_sample": False} | options
    return model.generate(ids, **options)


def digests(folder):
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }


def rehash(folder):
    """Make the manifest agree with the files that it lists."""
    path = folder / artifact.MANIFEST
    manifest = json.loads(path.read_bytes())
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(manifest))


def edit(folder, name, change):
    """Apply a function to the JSON in a file, in place."""
    data = json.loads((folder / name).read_bytes())
    change(data)
    (folder / name).write_text(json.dumps(data))


@pytest.fixture(scope="module")
def model():
    return ckv_compile.transform(tiny_model(**SMALL), **OPTIONS)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """An artifact of `model`."""
    folder = tmp_path_factory.mktemp("saved") / "artifact"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def packaged(model, tmp_path_factory):
    """One with a package for batches of one row."""
    folder = tmp_path_factory.mktemp("packaged") / "artifact"
    model.save_pretrained(folder, aot=[1])
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of an artifact, to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_generates_the_same_tokens(name, tmp_path, prompt):
    model = ckv_compile.transform(MODELS[name](), **OPTIONS, cache_dtype="int8" if "8 bits" in name else "auto")
    model.save_pretrained(tmp_path)
    loaded = ckv_compile.load(tmp_path, compile="eager")
    expected = generate(model, prompt(70, batch=2), return_dict_in_generate=True)
    found = generate(loaded, prompt(70, batch=2), return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip(cache_of(found).state, cache_of(expected).state, strict=True):
        assert torch.equal(ours, theirs)
    assert (loaded.dtype, loaded.training, loaded.passes) == (model.dtype, False, model.passes)
    assert loaded.config.model_type == model.config.model_type
    stored = [
        tensor
        for file in tmp_path.glob("*.safetensors")
        for tensors in [safe_open(file, "pt")]
        for tensor in (tensors.get_tensor(key) for key in tensors.keys())  # noqa: SIM118  (not a dict)
    ]
    assert sum(tensor.nbytes for tensor in stored) == sum(
        {t.data_ptr(): t.nbytes for t in (*model.graph.parameters(), *model.graph.buffers())}.values()
    )


def test_a_conversation_goes_on_in_a_loaded_model(model, saved, tmp_path, prompt):
    loaded, cache = ckv_compile.load(saved, compile="eager"), model.new_cache()
    model(prompt(70), cache=cache)
    model.save_cache(cache, tmp_path / "cache")
    expected = model(prompt(5, seed=1), cache=cache).logits
    assert torch.equal(loaded(prompt(5, seed=1), cache=loaded.load_cache(tmp_path / "cache")).logits, expected)


def test_a_loaded_model_can_be_saved_again(saved, tmp_path):
    ckv_compile.load(saved, compile="eager").save_pretrained(tmp_path / "again")
    before, after = digests(saved), digests(tmp_path / "again")
    for name in ("model.safetensors", "config.json", "generation_config.json", "ckv_config.json"):
        assert after[name] == before[name]


def test_torch_can_load_the_programs(saved, model, prompt):
    exported = torch.export.load(saved / "prefill.pt2").module(check_guards=False)
    state, own = model.new_cache(2).state, model.new_cache(2).state
    weights = [tensor for _, tensor in (*model.graph.named_parameters(), *model.graph.named_buffers())]
    with torch.no_grad():
        found = exported(*weights, prompt(30, batch=2), *state)[0]
        assert torch.equal(found, model.graph(prompt(30, batch=2), *own)[0])
    assert torch.equal(state.keys, own.keys)


def test_a_fresh_process_needs_no_model_code(capsys):
    path = Path(__file__).parent.parent / "demos" / "export.py"
    spec = importlib.util.spec_from_file_location("export_demo", path)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    demo.main(["--short"])
    printed = capsys.readouterr().out
    assert "the same 80 tokens" in printed
    rows = [line.strip("| ").split("|") for line in printed.splitlines() if line.startswith(("| transform", "| load"))]
    assert "modeling_llama" in rows[0][-1]
    assert rows[1][-1].strip() == "none"


def test_the_step_that_was_traced_is_compiled(model, saved, prompt, monkeypatch):
    loaded = ckv_compile.load(saved)
    monkeypatch.setattr(ckv_compile.pipeline, "reexport", None)
    assert torch.equal(generate(loaded, prompt(70)), generate(model, prompt(70)))


def test_a_package_needs_no_compiler(model, packaged, prompt, monkeypatch):
    loaded = ckv_compile.load(packaged)
    monkeypatch.setattr(torch, "compile", None)
    monkeypatch.setattr(torch.export, "export", None)
    assert torch.equal(generate(loaded, prompt(70)), generate(model, prompt(70)))


@pytest.mark.parametrize(("device", "index"), [("cpu", -1), ("cuda:1", 1)])
def test_a_package_can_be_recorded_on_the_device_of_its_artifact(device, index, packaged, monkeypatch):
    """With the locks of several threads it could not be part of a CUDA graph."""
    loaded, entered = [], []
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", lambda path, *options: loaded.append(options))
    monkeypatch.setattr(torch.cuda, "device", lambda given: contextlib.nullcontext(entered.append(given)))
    artifact._package(packaged / "decode-1.aot.pt2", [], torch.device(device))
    run_single_threaded, runners = True, 1
    assert loaded == [("model", run_single_threaded, runners, index)]
    assert entered == [index]


def test_packages_share_the_weights(packaged):
    """No program holds a weight or anything pickled, and the package holds no weight."""
    for name in ("prefill.pt2", "decode-1.pt2"):
        with zipfile.ZipFile(packaged / name) as archive:
            content = {entry.filename.partition("/")[2]: archive.read(entry) for entry in archive.infolist()}
        assert json.loads(content["data/weights/model_weights_config.json"]) == {"config": {}}
        assert json.loads(content["data/constants/model_constants_config.json"]) == {"config": {}}
        assert content["data/sample_inputs/model.pt"] == b""
    with safe_open(packaged / "model.safetensors", "pt") as file:
        some = file.get_tensor("model.model.layers.0.mlp.up_proj.weight").numpy().tobytes()
    with zipfile.ZipFile(packaged / "decode-1.aot.pt2") as archive:
        assert not any(some[:64] in archive.read(entry) for entry in archive.infolist())


def test_describe_says_what_is_there(packaged, model):
    assert artifact.is_artifact(packaged)
    found = artifact.describe(packaged)
    assert found["config"]["budget"] == 40
    assert (found["aot"], found["decode"], found["obstacle"], found["aot_obstacle"]) == ([1], [1], None, None)
    assert found["parameters"] == sum(parameter.numel() for parameter in model.graph.parameters())
    assert found["bytes"] == sum(file.stat().st_size for file in packaged.iterdir() if file.name != artifact.MANIFEST)


def test_another_machine_compiles_for_itself(packaged, prompt, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.raises(ArtifactError, match="instructions that this machine does not have"):
        ckv_compile.load(packaged, compile="aot")
    assert not ckv_compile.load(packaged)._decode_programs


# What is wrong with a folder


def damage(name, change):
    def apply(folder):
        data = bytearray((folder / name).read_bytes())
        change(data)
        (folder / name).write_bytes(data)

    return apply


def consistent(name, change):
    """Change the JSON of a file, and the manifest with it."""

    def apply(folder):
        edit(folder, name, change)
        rehash(folder)

    return apply


def listed(change):
    return lambda folder: edit(folder, artifact.MANIFEST, change)


def flip(data):
    data[-100] ^= 1


def link_out(folder):
    outside = folder.parent / "outside.json"
    shutil.move(folder / "config.json", outside)
    (folder / "config.json").symlink_to(outside)


def names_outside(path):
    def change(manifest):
        manifest["files"][path] = manifest["files"]["config.json"]

    return listed(change)


def transpose(folder):
    """Exchange the sizes of a weight in the header of its file, and make the manifest agree."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    header["model.model.layers.0.mlp.up_proj.weight"]["shape"].reverse()
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    path.write_bytes(data[:8] + text + data[8 + size :])
    rehash(folder)


def doctored(old, new):
    """Replace bytes of the prefill, and make the manifest agree."""

    def apply(folder):
        path = folder / "prefill.pt2"
        with zipfile.ZipFile(path) as archive:
            content = {entry.filename: archive.read(entry) for entry in archive.infolist()}
        assert any(old in data for data in content.values())
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data.replace(old, new))
        rehash(folder)

    return apply


def calls(operator):
    """Have the prefill call another operator in the place of silu."""
    return doctored(b"torch.ops.aten.silu.default", f"torch.ops.{operator}.default".encode())


def with_pickle(folder):
    with zipfile.ZipFile(folder / "prefill.pt2", "a") as archive:
        archive.writestr("archive/data/constants/constant_0", b"a pickle")
    rehash(folder)


BAD = {
    "no folder": (shutil.rmtree, "is no artifact"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "is no artifact"),
    "half a manifest": (damage("manifest.json", lambda data: data.__delitem__(slice(200, None))), "is no JSON"),
    "a manifest of something else": (listed(lambda m: m.update(format="a model")), "is not that of a"),
    "a newer version": (listed(lambda m: m.update(version=4, news=[])), "of version 4 of the format"),
    "another torch": (listed(lambda m: m.update(torch="2.9.1")), "saved by torch 2.9.1"),
    "another device": (listed(lambda m: m.update(device="cuda:0")), "cuda:0"),
    "an unknown field": (listed(lambda m: m.update(extra=1)), "does not have the fields"),
    "a field of another type": (listed(lambda m: m["files"]["config.json"].update(bytes="9")), "bytes is '9'"),
    "a file not listed": (listed(lambda m: m["files"].pop("prefill.pt2")), "does not list prefill.pt2"),
    "a missing file": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    "a truncated file": (damage("prefill.pt2", lambda data: data.__delitem__(slice(-9, None))), "prefill.pt2 has"),
    "a flipped bit": (damage("model.safetensors", flip), "model.safetensors is damaged"),
    "a wrong digest": (listed(lambda m: m["files"]["config.json"].update(sha256="0" * 64)), "config.json is damaged"),
    "a path with ..": (names_outside("../copy/config.json"), "no plain path inside the folder"),
    "an absolute path": (names_outside("/etc/hostname"), "no plain path inside the folder"),
    "a link out of the folder": (link_out, "is a link out of the artifact"),
    "a weight of another shape": (transpose, r"holds model\.model\.layers\.0\.mlp\.up_proj\.weight as \(48, 96\)"),
    "a weight that is not there": (
        consistent("ckv_config.json", lambda c: c["weights"][3].update(tensor="nothing")),
        "does not hold the tensors",
    ),
    "a weight of another dtype": (
        consistent("ckv_config.json", lambda c: c["weights"][3].update(dtype="int32")),
        "where ckv_config.json has",
    ),
    "fewer weights": (consistent("ckv_config.json", lambda c: c["weights"].pop()), "does not hold the tensors"),
    "a table of another version": (
        consistent("ckv_config.json", lambda c: c.update(version=4)),
        "ckv_config.json is of version 4",
    ),
    "sizes that no cache has": (
        consistent("ckv_config.json", lambda c: c["cache"].update(layers=-1)),
        "ckv_config.json is damaged",
    ),
    "an unknown option": (consistent("ckv_config.json", lambda c: c["config"].update(sinks=1)), "have the fields"),
    "an option out of range": (
        consistent("ckv_config.json", lambda c: c["config"].update(chunk_size=7)),
        "chunk_size=7",
    ),
    "another budget than the programs": (
        consistent("ckv_config.json", lambda c: c["config"].update(budget=48)),
        "takes keys as",
    ),
    "another plan than the programs": (
        consistent("ckv_config.json", lambda c: c["config"].update(n_sink=3)),
        "compacts keys by another plan",
    ),
    "light layers that the programs have not": (
        consistent("ckv_config.json", lambda c: c["config"].update(light_layers=[0], light_share=0.6)),
        r"light layers \(\), and the config has \(0,\)",
    ),
    "layers that the programs have elsewhere": (
        consistent(
            "ckv_config.json",
            lambda c: (
                c["config"].update(light_layers=[0], light_share=0.6),
                c["cache"].update(layers=1, light_layers=[0]),
            ),
        ),
        "takes keys as",
    ),
    "more layers than the programs": (
        consistent("ckv_config.json", lambda c: c["cache"].update(layers=3)),
        "takes keys as",
    ),
    "a program of other options": (doctored(b'"as_int": 40', b'"as_int": 41'), "compacts keys by another plan"),
    "a program that writes a file": (calls("aten.save"), "its argument filename could be the name of a file"),
    "a program that reads a file": (calls("aten.from_file"), "its argument filename could be the name of a file"),
    "a program that prints": (calls("prim.Print"), r"torch\.ops\.prim\.Print\.default is not allowed"),
    "a program that loads": (calls("debugprims.load_tensor"), r"debugprims\.load_tensor\.default is not allowed"),
    "a program that calls what is no operator": (calls("aten.nothing"), "there is no operator"),
    "a pickle in a program": (with_pickle, "constant_0 is no part of a program"),
    "a config of another type": (
        consistent("config.json", lambda c: c.update(hidden_size="wide")),
        "config.json is damaged",
    ),
}


def test_light_layers_are_saved_and_loaded(tmp_path, prompt):
    light = {"light_layers": [1], "light_share": 0.6}
    model = ckv_compile.transform(tiny_model(**SMALL), **(OPTIONS | light))
    model.save_pretrained(tmp_path)
    loaded = ckv_compile.load(tmp_path, compile="eager")
    assert loaded.ckv_config == model.ckv_config
    assert torch.equal(generate(loaded, prompt(70)), generate(model, prompt(70)))
    spoil = consistent(
        "ckv_config.json", lambda c: (c["config"].update(light_layers=[0]), c["cache"].update(light_layers=[0]))
    )
    spoil(tmp_path)
    with pytest.raises(ArtifactError, match=r"has the light layers \(1,\), and ckv_config.json has \(0,\)"):
        ckv_compile.load(tmp_path)


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said_before_anything_is_built(case, copy, monkeypatch):
    spoil, message = BAD[case]
    spoil(copy)
    monkeypatch.setattr(ckv_compile.model.CKVForCausalLM, "__init__", None)
    with pytest.raises(ArtifactError, match=message):
        ckv_compile.load(copy)


def test_whatever_happens_to_a_file_nothing_is_loaded_wrongly(copy, tmp_path, prompt):
    """Random damage, of half the cases with a manifest that agrees with it: an error, or the same tokens."""
    ids = prompt(60)
    expected = generate(ckv_compile.load(copy, compile="eager"), ids, max_new_tokens=3)
    names, refused, rng = sorted(json.loads((copy / "manifest.json").read_bytes())["files"]), 0, random.Random(0)
    for number in range(CORRUPTIONS):
        folder = tmp_path / str(number)
        shutil.copytree(copy, folder)
        agree = number % 2 == 1
        name = rng.choice(names if agree else [*names, artifact.MANIFEST])
        data = bytearray((folder / name).read_bytes())
        # Numbers of a weight mean nothing else: only the digest tells that they were changed.
        end = 8 + struct.unpack("<Q", data[:8])[0] if name.endswith(".safetensors") and agree else len(data)
        kind = rng.choice(["flip", "flip", "truncate", "extend", "delete", "swap", "zero"])
        if kind == "flip":
            flip_at = rng.randrange(end)
            data[flip_at] ^= 1 << rng.randrange(8)
        elif kind == "truncate":
            del data[rng.randrange(end) :]
        elif kind == "extend":
            data += rng.randbytes(rng.randint(1, 9))
        elif kind == "zero":
            start = rng.randrange(end)
            data[start : start + 16] = bytes(len(data[start : min(end, start + 16)]))
        elif kind == "swap":
            data = bytearray((folder / rng.choice(names)).read_bytes())
        if kind == "delete":
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(data)
            if agree:
                rehash(folder)
        try:
            loaded = ckv_compile.load(folder, compile="eager")
        except ArtifactError:
            refused += 1
        else:
            found = generate(loaded, ids, max_new_tokens=3)
            assert torch.equal(found, expected), (number, name, kind, agree)
        shutil.rmtree(folder)
    assert refused > CORRUPTIONS * 3 // 4


def test_modes_and_devices_that_are_not_there_are_named(copy):
    with pytest.raises(ArtifactError, match='compile="aot" needs compiled packages, but it has none'):
        ckv_compile.load(copy, compile="aot")
    with pytest.raises(ConfigError, match="compile='fast'"):
        ckv_compile.load(copy, compile="fast")
    with pytest.raises(ArtifactError, match="was saved on cpu and cannot be loaded on cuda:0"):
        ckv_compile.load(copy, device="cuda")
    with pytest.raises(ArtifactError, match="no device is named"):
        ckv_compile.load(copy, device="tpu!")


# Saving


@pytest.mark.parametrize("rows", [0, 9, True, "1"])
def test_batch_sizes_that_are_not_served_are_refused(rows, model, tmp_path):
    with pytest.raises(ConfigError, match="batch sizes are ints from 1 to 8"):
        model.save_pretrained(tmp_path / "out", aot=[rows])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["5XB", "5", "GB", "-1GB", "0.1 B", "0KB", "", 0, -1, 2.5, True, None])
def test_sizes_of_files_that_are_none_are_refused_before_anything_is_exported(size, model, tmp_path, monkeypatch):
    monkeypatch.setattr(artifact.program, "export", None)
    with pytest.raises(ConfigError, match=re.escape(f"max_shard_size={size!r}: pass a number of bytes")):
        model.save_pretrained(tmp_path / "out", max_shard_size=size)
    assert not list(tmp_path.iterdir())


@torch.library.custom_op("another_library::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@double.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_model_that_calls_another_library_is_not_saved(tmp_path):
    model = decoder()
    model.tokens.register_forward_hook(lambda module, args, output: double(output))
    model = ckv_compile.transform(model, **OPTIONS)
    with pytest.raises(ArtifactError, match=r"cannot be saved.*another_library\.double\.default is not allowed"):
        model.save_pretrained(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_nothing_but_an_artifact_is_replaced(model, copy, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo").write_text("keep")
    with pytest.raises(ArtifactError, match="holds files and is no artifact"):
        model.save_pretrained(tmp_path / "notes")
    with pytest.raises(ArtifactError, match="is a file"):
        model.save_pretrained(tmp_path / "notes" / "todo")
    (copy / "README.md").write_text("mine")
    with pytest.raises(ArtifactError, match=r"also holds README\.md"):
        model.save_pretrained(copy)
    assert (tmp_path / "notes" / "todo").read_text() == "keep"
    assert (copy / "README.md").read_text() == "mine"


class Killed(BaseException):
    """Ends a save at once: what only a living process could do is not done."""


@pytest.fixture
def quick_save(model, monkeypatch, copy):
    """Saves of `model` whose programs are those of `copy`, so that a test can do many."""
    files = {name: (copy / name).read_bytes() for name in ("prefill.pt2", "decode-1.pt2")}
    monkeypatch.setattr(artifact, "decode_graph", lambda *_: None)
    monkeypatch.setattr(artifact.program, "export", lambda graph, weights, state, steps: steps)
    monkeypatch.setattr(artifact.program, "to_bytes", lambda steps: files["decode-1.pt2" if steps else "prefill.pt2"])
    return model.save_pretrained


@pytest.mark.parametrize("size", ["100KB", " 0.1 mb", 100_000])
def test_weights_are_cut_into_files_of_a_size(size, quick_save, model, copy, prompt):
    quick_save(copy, max_shard_size=size)
    assert len(list(copy.glob("model-*.safetensors"))) > 1
    assert not (copy / "model.safetensors").exists()  # the artifact that was there is gone as a whole
    assert torch.equal(generate(ckv_compile.load(copy, compile="eager"), prompt(70)), generate(model, prompt(70)))


def test_a_killed_save_leaves_the_old_one_or_none(quick_save, copy, monkeypatch):
    """Killed before each call that changes the disk in a way that others see."""
    (copy / "config.json").write_bytes((copy / "config.json").read_bytes() + b" ")  # tells the old one from the new
    rehash(copy)
    old, original = digests(copy), shutil.copytree(copy, copy.with_name("original"))
    calls = {"left": 0}

    def mortal(real):
        def call(*args, **kwargs):
            if calls["left"] == 0:
                raise Killed
            calls["left"] -= 1
            return real(*args, **kwargs)

        return call

    for owner, name in ((Path, "rename"), (Path, "mkdir"), (Path, "write_text"), (Path, "write_bytes"), (os, "fsync")):
        monkeypatch.setattr(owner, name, mortal(getattr(owner, name)))
    monkeypatch.setattr(artifact.shutil, "rmtree", mortal(shutil.rmtree))
    outcomes = []
    for left in range(100):
        calls["left"] = left
        try:
            quick_save(copy)
            break
        except Killed:
            calls["left"] = -1  # no limit
            outcomes.append("old" if copy.is_dir() and digests(copy) == old else "new" if copy.is_dir() else "none")
            if outcomes[-1] == "none":
                with pytest.raises(ArtifactError, match="was killed before it was done"):
                    ckv_compile.load(copy)
                assert digests(copy.with_name(".copy.former")) == old
                copy.with_name(".copy.former").rename(copy)
            elif outcomes[-1] == "new":
                ckv_compile.load(copy, compile="eager")
                quick_save(copy)
                assert not copy.with_name(".copy.former").exists()
                shutil.rmtree(copy)
                shutil.copytree(original, copy)
    assert set(outcomes) >= {"old", "none"}
    assert outcomes == sorted(outcomes, key=["old", "none", "new"].index)
    assert digests(copy) != old


def test_the_next_save_recovers_from_a_killed_one(quick_save, copy):
    copy.rename(copy.with_name(".copy.former"))
    quick_save(copy)
    assert [path.name for path in copy.parent.iterdir()] == ["copy"]
    ckv_compile.load(copy, compile="eager")


def spoiled_folder(folder):
    """A folder that an artifact once was, and somebody's file."""
    folder.mkdir(exist_ok=True)
    (folder / "notes").write_text("keep")


@pytest.mark.parametrize("name", ["copy", ".copy.former"])
def test_what_is_put_in_a_place_while_a_save_writes_is_kept(name, quick_save, copy, monkeypatch):
    mine, write = copy.with_name(name), artifact._write

    def slow(*arguments):
        write(*arguments)
        spoiled_folder(mine)

    monkeypatch.setattr(artifact, "_write", slow)
    with pytest.raises(ArtifactError, match=r"also holds notes|\.copy\.former holds files and is no artifact"):
        quick_save(copy)
    assert (mine / "notes").read_text() == "keep"
    assert {path.name for path in copy.parent.iterdir()} == {"copy", name}
    ckv_compile.load(copy, compile="eager")


@pytest.mark.parametrize("target", ["with an artifact", "without one"])
@pytest.mark.parametrize("former", ["a folder", "a file"])
def test_a_former_one_that_is_no_artifact_is_neither_restored_nor_deleted(target, former, quick_save, copy):
    aside = copy.with_name(".copy.former")
    spoiled_folder(aside) if former == "a folder" else aside.write_text("keep")
    if target == "without one":
        shutil.rmtree(copy)
    with pytest.raises(ArtifactError, match=r"\.copy\.former (holds files and is no artifact|is a file)"):
        quick_save(copy)
    assert (aside / "notes" if former == "a folder" else aside).read_text() == "keep"
    assert copy.exists() == (target == "with an artifact")


def test_a_save_that_is_killed_while_it_deletes_does_not_stop_the_next(quick_save, copy, monkeypatch):
    deletes = shutil.rmtree

    def killed(folder, **options):
        if ".former" in folder.name:
            (folder / artifact.MANIFEST).unlink()
            raise Killed
        deletes(folder, **options)

    monkeypatch.setattr(artifact.shutil, "rmtree", killed)
    with pytest.raises(Killed):
        quick_save(copy)
    monkeypatch.setattr(artifact.shutil, "rmtree", deletes)
    quick_save(copy)
    ckv_compile.load(copy, compile="eager")


def test_a_failed_save_leaves_the_old_one(quick_save, copy, monkeypatch):
    old = digests(copy)
    monkeypatch.setattr(artifact, "_digest", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quick_save(copy)
    assert digests(copy) == old
    assert [path.name for path in copy.parent.iterdir()] == ["copy"]
