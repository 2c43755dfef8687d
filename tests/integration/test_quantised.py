"""Quantised directories against eager models that have the values they stand for, which were known before packing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights

import gascompile
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
