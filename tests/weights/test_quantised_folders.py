"""Directories of quantised models: what is read of them, and what is refused with the name of what is odd."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gascompile.core.errors import CheckpointError, GASCompileError
from gascompile.core.sources import WeightSource
from gascompile.weights.checkpoint import open_checkpoint
from tests.quantised_files import (
    AWQ,
    FP8,
    GPTQ,
    Layer,
    awq,
    compressed,
    compressed_config,
    fp8,
    gptq,
)

BF16 = torch.bfloat16
INT4 = compressed_config()
FLOAT = compressed_config("float-quantized", num_bits=8, type="float", strategy="channel")


def folder(path: Path, layer: Layer, config: Any, **others: torch.Tensor) -> Path:
    """Write a directory with one packed layer and a plain one."""
    path.mkdir(exist_ok=True)
    tensors = {f"a.layer.{name}": tensor for name, tensor in layer.parts.items()}
    save_file({**tensors, "a.norm.weight": torch.ones(8), **others}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def found(path: Path) -> WeightSource:
    sources = open_checkpoint(path).sources
    assert sources.keys() == {"a.layer.weight", "a.norm.weight"}
    return sources["a.layer.weight"]


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)


READ: Mapping[str, tuple[Callable[[], Layer], Any]] = {
    "gptq4-g32-f16-v1": (lambda: gptq(16, 64), GPTQ),
    "gptq4-g32-f16": (lambda: gptq(16, 64, version=2), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "gptq4-row-f16-v1": (lambda: gptq(16, 64, group=-1), {**GPTQ, "group_size": -1}),
    "gptq8-g32-f16-v1": (lambda: gptq(16, 64, bits=8), {**GPTQ, "bits": 8}),
    "gptq4-g32-f16-v1-idx": (lambda: gptq(16, 64, ordered=True), GPTQ),
    "awq4-g32-f16": (lambda: awq(16, 64), AWQ),
    "packed4-g32-bf16": (lambda: compressed(16, 64), INT4),
    "packed4-g32-bf16-idx": (lambda: compressed(16, 64, ordered=True), INT4),
    "packed4-g32-bf16-zeros": (
        lambda: compressed(16, 64, sym=False), compressed_config(symmetric=False),
    ),
    "packed8-row-bf16": (
        lambda: compressed(16, 63, bits=8, group=-1), compressed_config(num_bits=8, strategy="channel"),
    ),
    "fp8-32x32-f32": (lambda: fp8(40, 50), FP8),
    "fp8-row-bf16": (lambda: fp8(16, 24, block="row", dtype=BF16, name="weight_scale"), FLOAT),
    "fp8-all-f32": (lambda: fp8(16, 24, block="all"), {**FP8, "weight_block_size": None}),
}  # fmt: skip


@pytest.mark.parametrize("form", READ)
def test_parts_are_one_weight(form: str, tmp_path: Path) -> None:
    make, config = READ[form]
    layer = make()
    source = found(folder(tmp_path / "model", layer, config))
    assert (source.dtype, source.shape) == (form, tuple(layer.values.shape))
    raw = (tmp_path / "model" / "model.safetensors").read_bytes()
    lying = b"".join(raw[e.offset : e.offset + e.size_bytes] for e in source.extents)
    parts = {n: p for n, p in layer.parts.items() if n != "weight_shape"}
    if "g_idx" in parts and not form.endswith("idx"):
        del parts["g_idx"]
    assert len(lying) == sum(p.nbytes for p in parts.values())
    for part in parts.values():
        assert part.reshape(-1).view(torch.uint8).numpy().tobytes() in lying


def test_what_other_libraries_write_beside(tmp_path: Path) -> None:
    """Fields of how weights came to be, scales of activations, a factor per row as a vector, one as a vector of one."""
    more = {
        "damp_percent": 0.01, "meta": {"quantizer": ["x:1"]}, "true_sequential": True, "dataset": "c4", "lm_head": True,
        "dynamic": {"-:.*gate": {}}, "pack_dtype": "int32", "format": "gptq", "tokenizer": None,
    }  # fmt: skip
    assert found(folder(tmp_path / "a", gptq(16, 64), {**GPTQ, **more})).dtype.endswith("v1")
    static = compressed_config(
        "float-quantized", num_bits=8, type="float", strategy="tensor", activations={"num_bits": 8}
    )
    layer = fp8(16, 24, block="all", name="weight_scale")
    layer.parts["weight_scale"].resize_(1)
    scale = {"a.layer.input_scale": torch.ones(1)}
    assert found(folder(tmp_path / "b", layer, static, **scale)).dtype == "fp8-all-f32"
    layer = fp8(16, 24, block="row", dtype=BF16, name="weight_scale")
    layer.parts["weight_scale"].resize_(16)
    assert found(folder(tmp_path / "c", layer, FLOAT)).dtype == "fp8-row-bf16"


REFUSED: Mapping[str, tuple[Any, str]] = {
    "bits": ({**GPTQ, "bits": 3}, "bits is 3"),
    "no bits": ({k: v for k, v in GPTQ.items() if k != "bits"}, "bits is None"),
    "bits in words": ({**GPTQ, "bits": True}, "bits is True"),
    "groups": ({**GPTQ, "group_size": 0}, "group_size is 0"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    "marlin once": ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is True"),
    "two formats": ({**GPTQ, "format": "gptq_v2"}, "format is 'gptq_v2'"),
    "words": ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype is 'int16'"),
    "layers": ({**GPTQ, "dynamic": {"+:.*up": {"bits": 8}}}, "dynamic is"),
    "rotation": ({**GPTQ, "rotation": "hadamard"}, "rotation is 'hadamard'"),
    "gemv": ({**AWQ, "version": "gemv"}, "version is 'gemv'"),
    "llm-awq": ({**AWQ, "backend": "llm-awq"}, "backend is 'llm-awq'"),
    "no zeros": ({**AWQ, "zero_point": False}, "zero_point is False"),
    "awq 8": ({**AWQ, "bits": 8}, "bits is 8"),
    "bnb": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes'"),
    "nothing known": ({"quant_method": ["gptq"]}, "quant_method is"),
    "a text": ("gptq", "quant_method is ['gptq']"),
    "e5m2": ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
    "ue8m0": ({**FP8, "scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
    "blocks": ({**FP8, "weight_block_size": [128]}, "weight_block_size is"),
    "int2": (compressed_config(num_bits=2), "weights.num_bits is 2"),
    "strategy": (compressed_config(strategy="tensor_group"), "strategy is 'tensor_group'"),
    "layout": (compressed_config("nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'"),
    "unknown": (compressed_config(blinding=4), "blinding is 4"),
    "cache": ({**INT4, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
    "not compressed": ({**INT4, "quantization_status": "frozen"}, "quantization_status is"),
    "no groups": ({**INT4, "config_groups": {}}, "config_groups is"),
    "outputs": (
        {**INT4, "config_groups": {"g": {**INT4["config_groups"]["group_0"], "output_activations": {"num_bits": 8}}}},
        "output_activations is",
    ),
    "two groups": (
        {**INT4, "config_groups": INT4["config_groups"] | {"b": {"weights": {"strategy": "channel", "num_bits": 8}}}},
        "groups that differ",
    ),
    "sparse": ({**INT4, "sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_fields_that_are_not_read_are_named(case: str, tmp_path: Path) -> None:
    config, said = REFUSED[case]
    message = refusal(folder(tmp_path / "model", gptq(16, 64), config))
    assert said in message and "GGUF" in message


def changed(layer: Layer, **parts: torch.Tensor | None) -> Layer:
    """Return a layer with other parts, or without some."""
    kept = {n: p for n, p in {**layer.parts, **parts}.items() if p is not None}
    return Layer(parts=kept, values=layer.values)


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path, layer = tmp_path / "model", gptq(16, 64)

    def said(config: Any, layer: Layer, **others: torch.Tensor) -> str:
        return refusal(folder(path, layer, config, **others))

    assert "lacks its 'scales'" in said(GPTQ, changed(layer, scales=None))
    assert "qzeros' should be int32 of [2, 2], not int32 of [1, 2]" in said(
        GPTQ, changed(layer, qzeros=layer.parts["qzeros"][:1].clone())
    )
    assert "qzeros' should be int32 of [4, 2]" in said({**GPTQ, "group_size": 16}, layer)
    assert "lacks its 'g_idx'" in said({**GPTQ, "desc_act": True}, changed(layer, g_idx=None))
    assert "scales of float8" in said(
        GPTQ, changed(layer, scales=layer.parts["scales"].to(torch.float8_e4m3fn))
    )
    groups = layer.parts["g_idx"].clone()
    groups[3] = 2
    assert "groups from 0 to 2 of 2" in said(GPTQ, changed(layer, g_idx=groups))
    groups[3] = -1
    assert "groups from -1" in said(GPTQ, changed(layer, g_idx=groups))
    assert "all columns are of the first group" in said(
        GPTQ, changed(layer, g_idx=torch.zeros(64, dtype=torch.int32))
    )
    assert "names groups by int64" in said(GPTQ, changed(layer, g_idx=groups.long()))
    assert "beside one that is not packed" in said(
        GPTQ, layer, **{"a.layer.weight": torch.ones(16, 64)}
    )
    zeros = layer.parts["qzeros"].clone()
    zeros[0, 0] |= 15 << 8
    assert "zero points of zero" in said(GPTQ, changed(layer, qzeros=zeros))
    packed = compressed(16, 64)
    assert "zero points where" in said(compressed_config(symmetric=False), packed)
    shape = torch.tensor([16, 96])
    assert "of 16 x 96 values" in said(INT4, changed(packed, weight_shape=shape))
    assert "has no values" in said(INT4, changed(packed, weight_shape=torch.tensor([0, 64])))
    uneven = torch.arange(64, dtype=torch.int32) // 40
    assert "not of 32 columns" in said(INT4, changed(packed, weight_g_idx=uneven))
    blocks = fp8(40, 50)
    wrong = blocks.parts["weight_scale_inv"][:1].clone()
    assert "weight_scale_inv' should be" in said(FP8, changed(blocks, weight_scale_inv=wrong))
    other = blocks.parts["weight"].view(torch.uint8).view(torch.float8_e5m2)
    assert "not a matrix of float8_e4m3fn" in said(FP8, changed(blocks, weight=other))


def test_folders_that_do_not_say_how_are_refused_where_they_are_used(tmp_path: Path) -> None:
    """Without a configuration, or with one that is damaged, parts are tensors as any."""
    path = folder(tmp_path / "model", gptq(16, 64), GPTQ)
    for text in ("{}", "{", "[1]"):
        (path / "config.json").write_text(text)
        assert "a.layer.qweight" in open_checkpoint(path).sources
    torch.save({"a": torch.ones(2)}, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    (path / "config.json").write_text(json.dumps({"quantization_config": dict(GPTQ)}))
    assert "files of torch.save" in refusal(path)


def spoilt(config: Any, rng: random.Random) -> Any:
    """Return a configuration in which one value, somewhere, is another."""
    if isinstance(config, dict) and config and rng.random() < 0.9:
        key = rng.choice(list(config))
        return {**config, key: spoilt(config[key], rng)}
    return rng.choice(
        [None, True, -1, 0, 7, 1 << 70, 0.5, "", "int4", [], {}, [128, 128], {"a": 1}]
    )


def test_spoilt_folders_are_read_or_refused(tmp_path: Path) -> None:
    """A sample of configurations and headers with one mistake each: typed errors, or all of a weight's bytes."""
    rng = random.Random(7)
    made = [(make(), config) for make, config in READ.values()]
    for number in range(300):
        layer, config = made[number % len(made)]
        parts = dict(layer.parts)
        if number % 3:
            config = spoilt(dict(config), rng)
        else:
            name = rng.choice(list(parts))
            part = parts[name]
            parts[name] = rng.choice(
                [
                    part.reshape(-1),
                    part.view(torch.uint8) if part.dim() else part[None],
                    part[:1].clone() if part.dim() else part,
                    part[None],
                    torch.zeros(0, dtype=torch.int32),
                    torch.randint(0, 9, part.shape, dtype=torch.int32),
                ]
            )
        path = folder(tmp_path / "model", Layer(parts=parts, values=layer.values), config)
        try:
            sources = open_checkpoint(path).sources
        except GASCompileError:
            continue
        for source in sources.values():
            assert all(e.size_bytes > 0 for e in source.extents)
