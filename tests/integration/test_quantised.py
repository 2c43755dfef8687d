"""Quantised directories against eager models that have the values they stand for, which were known before packing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file

import gascompile
from gascompile.core.errors import CheckpointError, StorageError, UnsupportedOpError
from gascompile.integrations.generation import Generator
from tests.commands.command_line import ok
from tests.quantised_files import (
    AWQ,
    FP8,
    GPTQ,
    Folder,
    Layer,
    awq,
    compressed,
    compressed_config,
    fp8,
    gptq,
    quantised_folder,
)

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
CALL: dict[str, Any] = {"input_ids": (torch.arange(24) * 7 % 96).view(2, 12), "use_cache": False}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def made(dtype: torch.dtype = F32, kind: str = "Llama", **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **{**SIZES, "tie_word_embeddings": False, **settings}
    )
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def skeleton(folder: Folder, dtype: torch.dtype | None = None) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or folder.model.dtype)
    try:
        with init_empty_weights(include_buffers=False):
            return transformers.AutoModelForCausalLM.from_config(folder.model.config).eval()
    finally:
        torch.set_default_dtype(before)


def packed_bytes(folder: Folder, ignored: tuple[str, ...]) -> int:
    """Return the bytes that the tensors of a folder have in its files, but of those that nothing reads."""
    return sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in folder.parts.items()
        if not name.endswith(ignored)
    )


def check(
    folder: Folder, cache: Path, *, ignored: tuple[str, ...] = ("weight_shape", ".g_idx")
) -> Any:
    """Compare results with those of eager, and what moves with what lies in the files."""
    with torch.no_grad():
        wanted = folder.model(**CALL).logits
    budget = "256KiB" if folder.model.dtype != F32 else "384KiB"
    with gascompile.compile(
        skeleton(folder), budget, CALL, checkpoint=folder.path, cache_dir=cache, fuse="off"
    ) as compiled:
        found = compiled(**CALL).logits
        report, plan, formats = compiled.last_run, compiled.plan, compiled.format_report
    tolerance = {F32: 1e-5, F16: 4e-3, BF16: 2e-2}[folder.model.dtype]
    assert (found - wanted).float().norm() <= tolerance * wanted.float().norm()
    assert report is not None
    assert report.peak_bytes["cpu"] <= plan.budget_bytes["cpu"]
    total_bytes = packed_bytes(folder, ignored)
    assert sum(formats.size_bytes.values()) == total_bytes
    assert report.link_bytes["nvme->cpu"] <= total_bytes
    assert formats.relative_error == 0
    return formats


CASES: Mapping[str, tuple[torch.dtype, Callable[[int, int], Layer], Mapping[str, Any]]] = {
    "gptq": (F32, gptq, GPTQ),
    "gptq-f16": (F16, gptq, GPTQ),
    "gptq-v2-8": (
        F32,
        partial(gptq, version=2, bits=8, sym=True),
        {**GPTQ, "bits": 8, "sym": True, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-order": (F32, partial(gptq, group=16, ordered=True), {**GPTQ, "group_size": 16, "desc_act": True}),
    "awq": (F16, awq, AWQ),
    "packed": (BF16, compressed, compressed_config()),
    "packed-zeros-row": (
        F32,
        partial(compressed, sym=False, group=-1),
        compressed_config(symmetric=False, strategy="channel", group_size=None),
    ),
    "fp8": (BF16, fp8, FP8),
    "fp8-row": (
        F32,
        partial(fp8, block="row", name="weight_scale", dtype=BF16),
        compressed_config("float-quantized", num_bits=8, type="float", strategy="channel", group_size=None,
                          activations={"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_the_values(case: str, cache: Path, tmp_path: Path) -> None:
    dtype, make, config = CASES[case]
    folder = quantised_folder(made(dtype), tmp_path / "model", make, config)
    # Groups that lie in order are told by their size.
    ignored = ("weight_shape",) if case == "gptq-order" else ("weight_shape", ".g_idx")
    formats = check(folder, cache, ignored=ignored)
    assert (
        sum(form.startswith(("gptq", "awq", "packed", "fp8")) for form in formats.size_bytes) == 1
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Return a directory in three files, in which the parts of a weight lie in several of them; one layer is plain."""
    path = tmp_path_factory.mktemp("directory") / "model"
    model = made(F16)
    return quantised_folder(
        model,
        path,
        gptq,
        GPTQ,
        is_packed=lambda name: name == "lm_head" or (".layers." in name and ".k_proj" not in name),
        num_shards=3,
    )


def logits(folder: Folder) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = folder.model(**CALL).logits
    return found


def is_near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found - wanted).float().norm() <= 4e-3 * wanted.float().norm())


def test_a_directory_is_a_model(directory: Folder, cache: Path, tmp_path: Path) -> None:
    wanted = logits(directory)
    with gascompile.from_pretrained(
        directory.path, "256KiB", example_inputs=CALL, cache_dir=cache
    ) as compiled:
        found = compiled(**CALL).logits
        assert found.dtype == F16 and is_near(found, wanted)
        assert not hasattr(compiled.config, "quantization_config")
        stored = {w.name: w.stored for w in compiled.format_report.weights}
        compiled.save(tmp_path / "bundle")
    assert stored["model.layers.0.self_attn.k_proj.weight"] == "float16"
    assert stored["model.layers.0.self_attn.q_proj.weight"] == "gptq4-g32-f16-v1"
    assert stored["lm_head.weight"] == "gptq4-g32-f16-v1"
    moved = tmp_path / "elsewhere"
    shutil.copytree(directory.path, moved)
    for place in (None, moved):
        with gascompile.load(tmp_path / "bundle", checkpoint=place, cache_dir=cache) as loaded:
            assert torch.equal(loaded(**CALL).logits, found)
    plan = gascompile.plan(directory.path, "8MiB", "cpu-nvme", cache_dir=cache)
    forms = {t.forms.wire for t in plan.tensors.values() if t.forms}
    assert forms == {"gptq4-g32-f16-v1"}


def test_files_that_change_are_noticed(directory: Folder, cache: Path, tmp_path: Path) -> None:
    """The same program over other bytes, and bytes that are packed in another way now."""
    folder = tmp_path / "model"
    shutil.copytree(directory.path, folder)
    with gascompile.compile(folder, "8MiB", CALL, cache_dir=cache) as compiled:
        first = compiled(**CALL).logits
        assert is_near(first, logits(directory))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (folder / "config.json").write_text(json.dumps(config))
    with gascompile.compile(folder, "8MiB", CALL, cache_dir=cache) as compiled:
        assert not is_near(compiled(**CALL).logits, first)
        changed = next(file for file in folder.iterdir() if file.suffix == ".safetensors")
        os.utime(changed, ns=(1, 1))
        with pytest.raises(StorageError, match="changed"):
            compiled(**CALL)


def test_commands_take_a_directory(directory: Folder, cache: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    options = ("--budget", "8MiB", "--machine", "cpu-nvme", "--cache-dir", str(cache))
    assert "gptq4-g32-f16-v1" in ok("explain", str(directory.path), name, *options)


def test_text_is_that_of_eager(directory: Folder, cache: Path) -> None:
    prompt = CALL["input_ids"][:1, :5]
    wanted = directory.model.generate(prompt, max_new_tokens=4, do_sample=False)[0, 5:].tolist()
    with Generator(directory.path, "8MiB", max_length=16, cache_dir=cache) as generator:
        assert list(generator.stream(prompt, max_new_tokens=4)) == wanted


def test_a_table_of_words_that_is_packed_is_decoded_as_a_whole(cache: Path, tmp_path: Path) -> None:
    """Of a packed table no row can be fetched by itself; results are those of its values."""
    folder = quantised_folder(
        made(F32), tmp_path / "model", fp8, FP8, is_packed=lambda name: name.endswith("up_proj")
    )
    table = fp8(*folder.model.get_input_embeddings().weight.shape)
    folder.model.get_input_embeddings().weight.data.copy_(table.values)
    del folder.parts["model.embed_tokens.weight"]
    folder.parts |= {f"model.embed_tokens.{name}": part for name, part in table.parts.items()}
    save_file(folder.parts, folder.path / "model.safetensors")
    wanted = logits(folder)
    with gascompile.compile(folder.path, "8MiB", CALL, cache_dir=cache, fuse="off") as compiled:
        torch.testing.assert_close(compiled(**CALL).logits, wanted)


def refused(folder: Folder, cache: Path, **options: Any) -> str:
    with pytest.raises((CheckpointError, UnsupportedOpError)) as caught:
        gascompile.compile(
            skeleton(folder), "8MiB", CALL, checkpoint=folder.path, cache_dir=cache, **options
        )
    return str(caught.value)


def test_models_that_would_round_or_lose_are_refused(directory: Folder, cache: Path) -> None:
    narrow = skeleton(directory, BF16)
    with pytest.raises(CheckpointError, match=r"has the dtype .*needs bfloat16"):
        gascompile.compile(narrow, "8MiB", CALL, checkpoint=directory.path, cache_dir=cache)
    assert "leave weights= out" in refused(directory, cache, weights="int4")
    tied = skeleton(directory)
    tied.config.tie_word_embeddings = True
    tied.tie_weights()
    with pytest.raises(CheckpointError, match="tie_word_embeddings=False"):
        gascompile.compile(tied, "8MiB", CALL, checkpoint=directory.path, cache_dir=cache)
    file = next(directory.path.glob("*-00001-*.safetensors"))
    with pytest.raises(CheckpointError, match="pass the folder"):
        gascompile.compile(skeleton(directory), "8MiB", CALL, checkpoint=file, cache_dir=cache)


def test_layers_that_are_laid_out_otherwise_are_refused(cache: Path, tmp_path: Path) -> None:
    """Weights of GPT-2's layers lie the other way round, which a square one does not show; experts are joined."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=96, n_positions=16)
    model: Any = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    name = next(name for name in tensors if name.endswith("attn.c_proj.weight"))
    del tensors[name]
    parts = gptq(64, 64).parts
    layer = name.removesuffix(".weight")
    save_file(
        {**tensors, **{f"{layer}.{part}": p for part, p in parts.items()}},
        tmp_path / "a" / "model.safetensors",
    )
    data = {**config.to_dict(), "quantization_config": dict(GPTQ)}
    (tmp_path / "a" / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="belongs to a Conv1D"):
        gascompile.compile(model, "8MiB", CALL, checkpoint=tmp_path / "a", cache_dir=cache)


def test_experts_that_are_packed_one_by_one_are_refused(cache: Path, tmp_path: Path) -> None:
    model = made(F16, "Mixtral", num_local_experts=2)
    model.save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        parts = gptq(*tensors.pop(name).shape).parts
        tensors |= {f"{name.removesuffix('.weight')}.{part}": p for part, p in parts.items()}
    save_file(tensors, file)
    data = {**model.config.to_dict(), "quantization_config": dict(GPTQ)}
    (tmp_path / "a" / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="made of several that are quantised"):
        gascompile.compile(model, "8MiB", CALL, checkpoint=tmp_path / "a", cache_dir=cache)
