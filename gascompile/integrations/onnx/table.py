"""Which ONNX ops are known, and what each means."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from gascompile.integrations.onnx import math_ops as m
from gascompile.integrations.onnx import shape_ops as s
from gascompile.integrations.onnx.values import each, is_known

LINEAR: Final = "gascompile.Linear"
SILU: Final = "gascompile.Silu"
"""Ops that ONNX has no names for, and several nodes stand for: see ``whole_ops``."""

MIN_OPSET, MAX_OPSET = 13, 25
"""Between these, what the ops below mean differs by their attributes and inputs alone; later ones were not compared."""


@dataclass(frozen=True, slots=True)
class Op:
    """An op: what it computes, and which inputs it wants as numbers where they are constant."""

    compute: Callable[..., Any]
    numbers: tuple[int, ...] = ()


def _negative(x: Any) -> Any:
    return each(operator.neg, x) if is_known(x) else -x


_UNARY: Final[Mapping[str, str]] = {
    "Abs": "abs", "Ceil": "ceil", "Cos": "cos", "Erf": "erf", "Exp": "exp", "Floor": "floor", "IsNaN": "isnan",
    "Log": "log", "Not": "logical_not", "Reciprocal": "reciprocal", "Relu": "relu", "Round": "round",
    "Sigmoid": "sigmoid", "Sin": "sin", "Sqrt": "sqrt", "Tanh": "tanh",
}  # fmt: skip

OPS: Final[Mapping[str, Op]] = {
    **{name: Op(m.unary(torch_name)) for name, torch_name in _UNARY.items()},
    "HardSwish": Op(m.hard_swish), "Softplus": Op(m.softplus), "Sign": Op(m.sign),
    "Add": Op(m.binary("add", operator.add)), "Sub": Op(m.binary("sub", operator.sub)),
    "Mul": Op(m.binary("mul", operator.mul)), "Div": Op(m.divide), "Mod": Op(m.modulo),
    "Pow": Op(m.power, (1,)), "And": Op(m.binary("logical_and")), "Or": Op(m.binary("logical_or")),
    "Xor": Op(m.binary("logical_xor")), "Equal": Op(m.binary("eq", operator.eq)),
    "Less": Op(m.binary("lt")), "LessOrEqual": Op(m.binary("le")), "Greater": Op(m.binary("gt")),
    "GreaterOrEqual": Op(m.binary("ge")), "Max": Op(m.many("maximum")), "Min": Op(m.many("minimum")),
    "Sum": Op(m.many("add")), "Neg": Op(_negative), "Identity": Op(lambda x: x), "Clip": Op(m.clip, (1, 2)),
    "Cast": Op(m.cast), "Softmax": Op(m.softmax), "LogSoftmax": Op(m.log_softmax), "Gelu": Op(m.gelu),
    "LeakyRelu": Op(m.leaky_relu), "Elu": Op(m.elu), "MatMul": Op(m.binary("matmul")), "Gemm": Op(m.gemm),
    "Einsum": Op(m.einsum), "ArgMax": Op(m.arg("argmax")), "ArgMin": Op(m.arg("argmin")),
    "ReduceSum": Op(m.reducer(lambda x, d, k: x.sum(d, keepdim=k, dtype=x.dtype), whole=True)),
    "ReduceMean": Op(m.reducer(lambda x, d, k: x.mean(d, keepdim=k))),
    "ReduceMax": Op(m.reducer(lambda x, d, k: x.amax(d, keepdim=k), whole=True)),
    "ReduceMin": Op(m.reducer(lambda x, d, k: x.amin(d, keepdim=k), whole=True)),
    "ReduceL2": Op(m.reducer(lambda x, d, k: x.square().sum(d, keepdim=k).sqrt(), single="abs")),
    "CumSum": Op(m.cumsum), "LayerNormalization": Op(m.layer_norm), "RMSNormalization": Op(m.rms_norm),
    "BatchNormalization": Op(m.batch_norm), "Conv": Op(m.conv), "MaxPool": Op(m.max_pool),
    "GlobalAveragePool": Op(m.global_average_pool), "Dropout": Op(m.dropout, (1, 2)),
    "Shape": Op(s.shape), "Size": Op(s.size), "Reshape": Op(s.reshape), "Flatten": Op(s.flatten),
    "Transpose": Op(s.transpose), "Squeeze": Op(s.squeeze), "Unsqueeze": Op(s.unsqueeze), "Concat": Op(s.concat),
    "Split": Op(s.split), "Expand": Op(s.expand), "Tile": Op(s.tile), "Pad": Op(s.pad, (2,)),
    "Slice": Op(s.slice_), "Gather": Op(s.gather), "GatherElements": Op(s.gather_elements),
    "GatherND": Op(s.gather_nd), "ScatterND": Op(s.scatter_nd), "ScatterElements": Op(s.scatter_elements),
    "ConstantOfShape": Op(s.constant_of_shape), "Range": Op(s.range_, (0, 1, 2)), "Where": Op(s.where),
    "Trilu": Op(s.trilu), "Attention": Op(m.attention), "GroupNormalization": Op(m.group_norm),
}  # fmt: skip

WHOLE_OPS: Final[Mapping[str, Op]] = {LINEAR: Op(m.linear), SILU: Op(m.silu)}


@cache
def options_of(name: str) -> frozenset[str]:
    """Return the attributes that an op takes, and ``results`` and ``result_dtype`` where it wants those."""
    parameters = inspect.signature(OPS[name].compute).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
