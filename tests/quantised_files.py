"""Quantised checkpoints for tests, code by code from what the formats are published to be.

A layer is made from its codes, zero points and scales, which say what its values are; packing them is done here bit
by bit, in loops that nothing of the library has a part in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One packed weight: what files hold of it, and the values that this stands for, in float64."""

    parts: Mapping[str, torch.Tensor]
    values: torch.Tensor


def words(
    numbers: list[list[int]], bits: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Pack each list of numbers into int32, the first number in the lowest bits."""
    each = 32 // bits
    packed = []
    for row in numbers:
        line = []
        for begin in range(0, len(row), each):
            word = 0
            for place in range(each):
                index = begin + (order[place] if order else place)
                if index < len(row):
                    assert 0 <= row[index] < 1 << bits
                    word |= row[index] << (bits * place)
            line.append(word - (1 << 32) if word >= 1 << 31 else word)
        packed.append(line)
    return torch.tensor(packed, dtype=torch.int32)


def _transposed(numbers: list[list[int]]) -> list[list[int]]:
    return [list(row) for row in zip(*numbers, strict=True)]


def _numbers(shape: tuple[int, int], low: int, high: int) -> list[list[int]]:
    found: list[list[int]] = torch.randint(low, high, shape).tolist()
    return found


def _values(
    codes: list[list[int]],
    zeros: list[list[int]],
    scales: torch.Tensor,
    groups: list[int],
) -> torch.Tensor:
    """Return ``(code - zero) * scale``, with zeros and scales of ``[rows, groups]``; exact in float64."""
    exact = scales.double().tolist()
    return torch.tensor(
        [
            [(code - zeros[r][groups[c]]) * exact[r][groups[c]] for c, code in enumerate(row)]
            for r, row in enumerate(codes)
        ],
        dtype=torch.float64,
    )


def _scales(rows: int, groups: int, dtype: torch.dtype, largest: float = 0.02) -> torch.Tensor:
    return (torch.rand(rows, groups) * largest + largest / 10).to(dtype)


def _groups(columns: int, size: int, *, ordered: bool) -> list[int]:
    size = columns if size == -1 else size
    found = torch.tensor([column // size for column in range(columns)])
    if ordered:
        found = found[torch.randperm(columns)]
    return [int(group) for group in found]


def gptq(
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group: int = 32,
    dtype: torch.dtype = torch.float16,
    version: int = 1,
    sym: bool = False,
    ordered: bool = False,
    has_groups: bool = True,
) -> Layer:
    """Return a layer as GPTQ's libraries store it."""
    largest = 1 << bits
    groups = _groups(columns, group, ordered=ordered)
    count = max(groups) + 1
    codes = _numbers((rows, columns), 0, largest)
    zeros = [[largest // 2] * count] * rows if sym else _numbers((rows, count), 1, largest)
    scales = _scales(rows, count, dtype)
    kept = [[zero - (version == 1) for zero in row] for row in zeros]
    parts = {
        "qweight": words(codes, bits).t().contiguous(),
        "qzeros": words(_transposed(kept), bits),
        "scales": scales.t().contiguous(),
    }
    if has_groups:
        parts["g_idx"] = torch.tensor(groups, dtype=torch.int32)
    return Layer(parts=parts, values=_values(codes, zeros, scales, groups))


def awq(rows: int, columns: int, *, group: int = 32, dtype: torch.dtype = torch.float16) -> Layer:
    """Return a layer in the gemm layout of AutoAWQ."""
    groups = _groups(columns, group, ordered=False)
    count = max(groups) + 1
    codes, zeros = _numbers((rows, columns), 0, 16), _numbers((rows, count), 0, 16)
    scales = _scales(rows, count, dtype)
    parts = {
        "qweight": words(_transposed(codes), 4, AWQ_ORDER),
        "qzeros": words(_transposed(zeros), 4, AWQ_ORDER),
        "scales": scales.t().contiguous(),
    }
    return Layer(parts=parts, values=_values(codes, zeros, scales, groups))


def compressed(
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    sym: bool = True,
    ordered: bool = False,
) -> Layer:
    """Return a layer of compressed-tensors' pack-quantized format; -1: one group per row."""
    middle = 1 << bits - 1
    groups = _groups(columns, group, ordered=ordered)
    count = max(groups) + 1
    codes = _numbers((rows, columns), -middle, middle)
    zeros = [[0] * count] * rows if sym else _numbers((rows, count), -middle, middle)
    scales = _scales(rows, count, dtype)
    parts = {
        "weight_packed": words([[code + middle for code in row] for row in codes], bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not sym:
        moved = [[zero + middle for zero in row] for row in zeros]
        parts["weight_zero_point"] = words(_transposed(moved), bits).t().contiguous()
    if ordered:
        parts["weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
    return Layer(parts=parts, values=_values(codes, zeros, scales, groups))


def e4m3(byte: int) -> float:
    """Return what a byte is: a sign, four bits of exponent, three of fraction; all ones are no number."""
    sign, exponent, fraction = (-1.0 if byte & 128 else 1.0), (byte >> 3) & 15, byte & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def fp8(
    rows: int,
    columns: int,
    *,
    block: tuple[int, int] | str = (32, 32),
    dtype: torch.dtype = torch.float32,
    name: str = "weight_scale_inv",
    has_nan: bool = False,
) -> Layer:
    """Return a layer of fp8 with a factor for each ``block``, for each ``"row"`` or for ``"all"``."""
    size = (
        {"row": (1, columns), "all": (rows, columns)}.get(block)
        if isinstance(block, str)
        else block
    )
    assert size is not None
    scales = _scales(-(-rows // size[0]), -(-columns // size[1]), dtype, 0.0005)
    codes = _numbers((rows, columns), 0, 256)
    if not has_nan:
        codes = [[code - 1 if code & 127 == 127 else code for code in row] for row in codes]
    exact = scales.double().tolist()
    values = torch.tensor(
        [
            [e4m3(code) * exact[r // size[0]][c // size[1]] for c, code in enumerate(row)]
            for r, row in enumerate(codes)
        ],
        dtype=torch.float64,
    )
    raw = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return Layer(parts={"weight": raw, name: scales}, values=values)


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return exact values in a dtype: rounded to float32, where that changes any, and to ``dtype``."""
    return values.float().to(dtype)


@dataclass(kw_only=True)
class Folder:
    """A directory of a quantised model, and that model with the values that it stands for."""

    path: Path
    model: Any
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    num_bytes: int = 0


def quantised_folder(
    model: Any,
    path: Path,
    make: Callable[[int, int], Layer],
    config: Mapping[str, Any],
    *,
    is_packed: Callable[[str], bool] = lambda name: ".layers." in name,
    num_shards: int = 1,
) -> Folder:
    """Write a directory in which the linear layers that ``is_packed`` are packed, and give ``model`` their values.

    Shards have the parts of a layer in turns, so that those of one weight lie in several files.
    """
    tensors: dict[str, torch.Tensor] = {}
    dtype = next(model.parameters()).dtype
    names = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        is_linear = isinstance(names.get(layer), torch.nn.Linear) and name.endswith(".weight")
        if not (is_linear and is_packed(layer)):
            tensors[name] = parameter.detach().clone()
            continue
        made = make(*parameter.shape)
        tensors |= {f"{layer}.{part}": tensor for part, tensor in made.parts.items()}
        with torch.no_grad():
            parameter.copy_(rounded(made.values, dtype))
    path.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    data = {**model.config.to_dict(), "quantization_config": dict(config)}
    data["dtype"] = str(dtype).removeprefix("torch.")
    (path / "config.json").write_text(json.dumps(data))
    _write(path, tensors, num_shards)
    return Folder(path=path, model=model, parts=tensors)


def _write(path: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        shard = dict(list(tensors.items())[i::num_shards])
        save_file(shard, path / file)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


GPTQ: Mapping[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False, "checkpoint_format": "gptq",
}  # fmt: skip
AWQ: Mapping[str, Any] = {
    "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
}  # fmt: skip
FP8: Mapping[str, Any] = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 32],
}  # fmt: skip


def compressed_config(
    layout: str = "pack-quantized", *, activations: Any = None, **weights: Any
) -> dict[str, Any]:
    """Return the configuration of compressed-tensors for one scheme."""
    of_weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
    }
    scheme = {
        "targets": ["Linear"],
        "weights": of_weights | weights,
        "input_activations": activations,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
