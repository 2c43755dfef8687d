"""A Hugging Face directory in the place of a model: what ``from_pretrained`` would give, read in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

import gascompile
from gascompile.core.errors import CheckpointError

_IDS = torch.arange(12).reshape(1, 12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_directory_is_compiled_as_its_model(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    inputs: dict[str, Any] = {"input_ids": _IDS, "use_cache": False}
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(folder).eval()(**inputs).logits
    for given in (folder, str(folder)):
        with gascompile.compile(
            given, "1MiB", example_inputs=inputs, machine="cpu-nvme", cache_dir=cache
        ) as compiled:
            assert torch.equal(compiled(**inputs).logits, wanted)
    assert not list(cache.glob("store/*.safetensors"))


@pytest.mark.parametrize("beside", ["shards", "only the index", "files of torch.save", "a variant"])
def test_the_weights_of_a_directory_are_those_that_transformers_takes(
    folder: Path, tmp_path: Path, beside: str
) -> None:
    """What was there before a model was saved anew stays beside it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    whole = folder / "model.safetensors"
    if beside == "files of torch.save":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        whole.rename(folder / "other.safetensors")
    elif beside == "a variant":
        whole.with_name("model.fp16.safetensors").write_bytes(whole.read_bytes())
    else:
        whole.unlink()
        model.save_pretrained(folder, max_shard_size="20KB")
        assert not whole.exists()
        shards = list(folder.glob("*.safetensors"))
        if beside == "only the index":
            for shard in shards:
                shard.unlink()
    for parameter in model.parameters():
        parameter.data.add_(0.25)
    if beside == "files of torch.save":
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    else:
        model.save_pretrained(tmp_path / "again")
        (tmp_path / "again" / "model.safetensors").rename(whole)
    inputs: dict[str, Any] = {"input_ids": _IDS, "use_cache": False}
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(folder).eval()(**inputs).logits
    with gascompile.compile(
        folder, "1MiB", machine="cpu-nvme", cache_dir=tmp_path / "cache"
    ) as compiled:
        assert torch.equal(compiled(**inputs).logits, wanted)


def test_an_index_without_shards_is_a_model_without_weights(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    weight_map = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    with pytest.raises(CheckpointError, match="checkpoint="):
        gascompile.compile(folder, "1MiB", machine="cpu-nvme", cache_dir=tmp_path)


def test_what_is_no_directory_of_a_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="or a Hugging Face directory"):
        gascompile.compile(7, "1MiB")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"config\.json"):
        gascompile.compile(tmp_path / "nowhere", "1MiB")
    config, sound = folder / "config.json", (folder / "config.json").read_text()
    config.write_text(sound.replace('"model_type": "llama"', '"model_type": "gpt2"'))
    with pytest.raises(CheckpointError, match=r"built from a LlamaConfig.*makes a GPT2Config"):
        gascompile.compile(folder, "1MiB")
    config.write_text(sound)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be used"):
        gascompile.compile(folder, "1MiB")
    (folder / "generation_config.json").unlink()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="checkpoint="):
        gascompile.compile(folder, "1MiB")


def test_what_a_directory_says_about_generation_counts(folder: Path, tmp_path: Path) -> None:
    GenerationConfig(eos_token_id=[7, 9], temperature=0.5, do_sample=True).save_pretrained(folder)
    compiled: Any = gascompile.compile(folder, "1MiB", machine="cpu-nvme", cache_dir=tmp_path)
    assert compiled.generation_config.eos_token_id == [7, 9]
    assert compiled.generation_config.temperature == 0.5


def test_a_model_is_found_by_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    inputs: dict[str, Any] = {"input_ids": _IDS, "use_cache": False}
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(folder).eval()(**inputs).logits
    kept = tmp_path / "hub" / "models--some--llama"
    (kept / "snapshots").mkdir(parents=True)
    folder.rename(kept / "snapshots" / "c0ffee")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("c0ffee")
    options: dict[str, Any] = {"machine": "cpu-nvme", "cache_dir": tmp_path / "cache"}
    named = kept / "snapshots" / "c0ffee"
    for given in ("some/llama", named):
        with gascompile.from_pretrained(given, "1MiB", **options) as compiled:
            assert torch.equal(compiled(**inputs).logits, wanted)
    with pytest.raises(CheckpointError, match="'some/other' is neither a folder here nor"):
        gascompile.from_pretrained("some/other", "1MiB", **options)
    with pytest.raises(CheckpointError, match="neither a folder here"):
        gascompile.from_pretrained("no such: folder", "1MiB", **options)
    with pytest.raises(CheckpointError, match="neither a folder here"):
        gascompile.from_pretrained("x" * 5000, "1MiB", **options)
    with pytest.raises(ValueError, match="revision"):
        gascompile.from_pretrained(named, "1MiB", revision="main", **options)
    with pytest.raises(ValueError, match="nonsense"):
        gascompile.from_pretrained("some/llama", "nonsense", **options)
