"""``quantization_config`` of a Hugging Face directory: what is known of it becomes a scheme, the rest is refused."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from gascompile.core.errors import CheckpointError, FormatError, StorageError
from gascompile.core.files import is_file
from gascompile.core.serial import read_json

_log = logging.getLogger("gascompile")

_ADVICE = (
    "use a GGUF file of the model (Q4_K, Q6_K, Q8_0 or Q4_0), a GPTQ, AWQ, compressed-tensors or fp8 folder as "
    "docs/weight-forms.md lists them, or its checkpoint before it was quantised, with weights='int4' or 'int8'"
)
_LARGEST_GROUP = 1 << 20  # columns; configurations say 32 to 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the packed weights of one directory are packed."""

    kind: str
    """Of ``Packing``."""
    bits: int
    group: int = 0
    block_rows: int = 1
    zeros: bool = False
    is_less_one: bool = False
    names_groups: bool = False
    """Whether columns are of groups in another order than they lie in, which a part has to say."""
    scale_name: str = "weight_scale"
    rounds_activations: bool = False
    """Whether its own library rounds activations, too, which are not rounded here."""


@dataclass(frozen=True, slots=True)
class _Fields:
    """A JSON object whose fields are read one by one; errors name the field."""

    values: Mapping[str, Any]
    where: str

    def refuse(self, field: str, why: str = "") -> CheckpointError:
        """Return the error for a field whose value is not read."""
        value = ascii(self.values.get(field))[:120]
        return CheckpointError(
            f"{self.where}.{field} is {value}, which cannot be read in place{why and f' ({why})'}; {_ADVICE}"
        )

    def one_of(
        self, field: str, known: Collection[Any], otherwise: Any = None, why: str = ""
    ) -> Any:
        """Return the value of a field, which has to be a known one."""
        value = self.values.get(field, otherwise)
        if not any(type(value) is type(one) and value == one for one in known):
            raise self.refuse(field, why)
        return value

    def count(self, field: str, otherwise: int | None = None) -> int:
        """Return the value of a field that counts something."""
        value = self.values.get(field, otherwise)
        if type(value) is not int or not 0 < value <= _LARGEST_GROUP:
            raise self.refuse(field)
        return value

    def only(self, known: Collection[str]) -> None:
        """Refuse fields of which it is not known what they change."""
        for field, value in self.values.items():
            if field not in known and value not in (None, False, [], {}):
                raise CheckpointError(
                    f"{self.where}.{ascii(field)[1:-1]:.80} is {ascii(value)[:120]}, and it is not known what that "
                    f"changes; {_ADVICE}"
                )


def quantisation_of(folder: Path) -> dict[str, Any] | None:
    """Return what the ``config.json`` of a folder says of how its weights are quantised; ``None``: nothing.

    A file that is none says nothing here: weights that are packed are then told by their names, and refused.
    """
    if not is_file(folder / "config.json"):
        return None
    try:
        data = read_json(folder / "config.json", strict=False)
    except (FormatError, StorageError):
        return None
    quantisation = data.get("quantization_config") if isinstance(data, dict) else None
    # Something that is no object says that weights are quantised, too.
    return (
        quantisation
        if isinstance(quantisation, dict) or not quantisation
        else {"quant_method": [quantisation]}
    )


def scheme_of(quantization: Any, where: str) -> Scheme:
    """Return how the weights of a directory are packed.

    Args:
        quantization: the ``quantization_config`` of its ``config.json``.
        where: what errors call the directory.

    Raises:
        CheckpointError: names the field that is not known or says what is not read.
    """
    fields = _Fields(
        quantization if isinstance(quantization, dict) else {}, f"{where}: quantization_config"
    )
    method = fields.values.get("quant_method")
    reader = _METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise fields.refuse("quant_method")
    scheme: Scheme = reader(fields)
    if scheme.rounds_activations:
        _tell_of_activations(where)
    return scheme


@cache
def _tell_of_activations(where: str) -> None:
    """Say once of each directory that its results are not those of the library that it is for."""
    _log.warning(
        "%s is of a scheme that rounds activations, too; here weights alone are, so that results are those of its "
        "dequantised weights",
        where,
    )


_OF_QUANTISING: Final = frozenset(
    (
        "quant_method", "method", "meta", "modules_to_not_convert", "ignored_layers", "damp_percent",
        "damp_auto_increment", "static_groups", "true_sequential", "dataset", "tokenizer", "model_name_or_path",
        "model_file_base_name", "batch_size", "pad_token_id", "model_seqlen", "block_name_to_quantize",
        "module_name_preceding_first_block", "modules_in_block_to_quantize", "cache_block_outputs", "use_cuda_fp16",
        "use_exllama", "disable_exllama", "exllama_config", "max_input_length", "mse", "act_group_aware", "lm_head",
        "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "desc_act", "sym", "uri",
    )
)  # fmt: skip
"""How weights came to be, which library multiplies by them how, and which are packed: the files say that themselves."""


def _group(fields: _Fields, *names: str) -> int:
    """Return the columns that share a scale; 0 for all of a row."""
    name = next((name for name in names if name in fields.values), names[0])
    return 0 if fields.values.get(name) == -1 else fields.count(name)


def _bits(fields: _Fields, known: Collection[int], *names: str) -> int:
    name = next((name for name in names if name in fields.values), names[0])
    return int(fields.one_of(name, known))


def _gptq(fields: _Fields) -> Scheme:
    fields.only(
        {
            *_OF_QUANTISING,
            "bits",
            "group_size",
            "checkpoint_format",
            "format",
            "pack_dtype",
            "dynamic",
            "backend",
        }
    )
    fields.one_of("method", ("gptq",), "gptq")
    fields.one_of("pack_dtype", ("int32", "torch.int32"), "int32")
    fields.one_of("backend", ("auto", "auto_trainable", "torch", "gptq_torch", None))
    dynamic = fields.values.get("dynamic")
    if dynamic and not (isinstance(dynamic, dict) and all(key.startswith("-:") for key in dynamic)):
        raise fields.refuse("dynamic", "layers that are packed in other ways")
    known = ("gptq", "gptq_v2")
    formats = [
        fields.one_of(name, known, why="repacked for some kernels")
        for name in ("checkpoint_format", "format")
        if fields.values.get(name) is not None
    ]
    if len(set(formats)) > 1:
        raise fields.refuse("format", f"checkpoint_format is {formats[0]}")
    return Scheme(
        kind="gptq",
        bits=_bits(fields, (4, 8), "bits"),
        group=_group(fields, "group_size"),
        zeros=True,
        is_less_one=(formats or ["gptq"])[0] == "gptq",
        names_groups=bool(fields.one_of("desc_act", (True, False, None))),
    )


def _awq(fields: _Fields) -> Scheme:
    fields.only(
        {*_OF_QUANTISING, "bits", "w_bit", "group_size", "q_group_size", "version", "format", "zero_point", "backend",
         "checkpoint_format"}
    )  # fmt: skip
    known = ("gemm", "GEMM")
    for name in ("version", "format", "checkpoint_format"):
        if fields.values.get(name) is not None:
            fields.one_of(name, known, why="another layout")
    fields.one_of("backend", ("auto", "autoawq", "torch_awq", None))
    fields.one_of("zero_point", (True,), True)
    return Scheme(
        kind="awq",
        bits=_bits(fields, (4,), "bits", "w_bit"),
        group=_group(fields, "group_size", "q_group_size"),
        zeros=True,
    )


def _fp8(fields: _Fields) -> Scheme:
    fields.only({"quant_method", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers",
                 "dequantize", "fmt", "scale_fmt", "expert_dtype"})  # fmt: skip
    fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.one_of("fmt", ("e4m3",), "e4m3")
    fields.one_of("scale_fmt", ("float",), "float", "scales of another format")
    block = fields.values.get("weight_block_size")
    if block is None:
        return Scheme(
            kind="fp8", bits=8, block_rows=0, scale_name="weight_scale_inv", rounds_activations=True
        )
    rows, columns = _block(fields, "weight_block_size")
    return Scheme(
        kind="fp8",
        bits=8,
        group=columns,
        block_rows=rows,
        scale_name="weight_scale_inv",
        rounds_activations=True,
    )


def _block(fields: _Fields, name: str) -> tuple[int, int]:
    block = fields.values.get(name)
    is_block = isinstance(block, list) and len(block) == 2
    if not is_block or not all(type(v) is int and 0 < v <= _LARGEST_GROUP for v in block or ()):
        raise fields.refuse(name)
    assert isinstance(block, list)
    return block[0], block[1]


def _compressed(fields: _Fields) -> Scheme:
    fields.only({"quant_method", "format", "config_groups", "ignore", "quantization_status", "global_compression_ratio",
                 "version", "run_compressed", "sparsity_config"})  # fmt: skip
    fields.one_of("quantization_status", ("compressed",), "compressed")
    sparsity = _Fields(
        fields.values.get("sparsity_config") or {}, f"{fields.where}.sparsity_config"
    )
    sparsity.one_of("format", ("dense",), "dense")
    layout = fields.one_of("format", ("pack-quantized", "float-quantized"))
    groups = fields.values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise fields.refuse("config_groups")
    schemes = [
        _of_group(
            _Fields(_object(group), f"{fields.where}.config_groups.{ascii(name)[1:-1]:.60}"), layout
        )
        for name, group in groups.items()
    ]
    if any(scheme != schemes[0] for scheme in schemes):
        raise fields.refuse("config_groups", "groups that differ in how weights are packed")
    return schemes[0]


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _of_group(fields: _Fields, layout: str) -> Scheme:
    fields.only({"targets", "weights", "input_activations", "format"})
    if fields.values.get("format") is not None:
        fields.one_of("format", (layout,))
    weights = _Fields(_object(fields.values.get("weights")), f"{fields.where}.weights")
    # What the observer of a dynamic scheme saw, and how codes were ordered while they were chosen, changes no value.
    weights.only({"num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "observer",
                  "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"})  # fmt: skip
    strategy = weights.values.get("strategy")
    rounds = bool(fields.values.get("input_activations"))
    if layout == "float-quantized":
        weights.one_of("type", ("float",))
        weights.one_of("num_bits", (8,))
        weights.one_of("symmetric", (True,), True)
        shapes = {"tensor": (0, 0), "channel": (1, 0)}
        if strategy == "block":
            block = _block(weights, "block_structure")
        else:
            block = shapes[weights.one_of("strategy", tuple(shapes))]
        return Scheme(
            kind="fp8", bits=8, block_rows=block[0], group=block[1], rounds_activations=rounds
        )
    weights.one_of("type", ("int",), "int")
    weights.one_of("strategy", ("group", "channel"))
    is_symmetric = weights.one_of("symmetric", (True, False), True)
    return Scheme(
        kind="packed",
        bits=_bits(weights, (4, 8), "num_bits"),
        group=weights.count("group_size") if strategy == "group" else 0,
        zeros=not is_symmetric,
        names_groups=weights.values.get("actorder") in ("group", "dynamic", True),
        rounds_activations=rounds,
    )


_METHODS: Final = {"gptq": _gptq, "awq": _awq, "fp8": _fp8, "compressed-tensors": _compressed}
