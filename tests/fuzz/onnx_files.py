"""Small ONNX files, ways to spoil them, and what must hold of one that is taken nevertheless.

What both we and onnxruntime take has to compute the same; everything else has to be refused with a typed error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

NAMES = ("mlp", "shapes", "conv", "attention")
DATA = "weights.bin"


def make_seeds(folder: Path) -> None:
    """Write every seed below ``folder``, each in a folder of its own."""
    rng = np.random.default_rng(0)
    for name, (nodes, inputs, outputs, held) in _graphs(rng).items():
        place = folder / name
        place.mkdir(parents=True)
        graph = helper.make_graph(
            nodes, name, inputs, outputs, _held(held, place, inside=name == "conv")
        )
        opset = [helper.make_opsetid("", 23)]
        model = helper.make_model(graph, opset_imports=opset, ir_version=10)
        (place / "m.onnx").write_bytes(model.SerializeToString())
        onnx.checker.check_model(place / "m.onnx")


def _held(arrays: Mapping[str, Any], place: Path, *, inside: bool) -> list[TensorProto]:
    """Return initializers: large ones in a file beside the model, unless they are to lie inside."""
    found, data = [], bytearray()
    for name, array in arrays.items():
        tensor = numpy_helper.from_array(array, name)
        if array.nbytes >= 256 and not inside:
            raw = tensor.raw_data
            onnx.external_data_helper.set_external_data(tensor, DATA, len(data), len(raw))
            tensor.ClearField("raw_data")
            data += raw
        found.append(tensor)
    if data:
        (place / DATA).write_bytes(bytes(data))
    return found


def _graphs(rng: Any) -> dict[str, Any]:
    def floats(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    def value(name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    def ints(*numbers: int) -> Any:
        return np.array(numbers, np.int64)

    node = helper.make_node
    mlp = [
        node("Transpose", ["w1"], ["w1t"], perm=[1, 0]),
        node("MatMul", ["x", "w1t"], ["h"]), node("Add", ["h", "b1"], ["h1"]), node("Gelu", ["h1"], ["g"]),
        node("Gemm", ["g", "w2", "b2"], ["m"], transB=1, alpha=0.5), node("Sigmoid", ["m"], ["s"]),
        node("Mul", ["m", "s"], ["silu"]),
        node("LayerNormalization", ["silu", "n", "nb"], ["l"], axis=-1, epsilon=1e-3),
        node("Softmax", ["l"], ["y"], axis=1),
    ]  # fmt: skip
    shapes = [
        node("Gather", ["table", "ids"], ["e"], axis=0), node("Shape", ["e"], ["sh"], start=0, end=2),
        node("Concat", ["sh", "heads"], ["to"], axis=0), node("Reshape", ["e", "to"], ["r"]),
        node("Transpose", ["r"], ["t"], perm=[0, 2, 1, 3]), node("Slice", ["t", "b", "en", "ax", "st"], ["sl"]),
        node("Unsqueeze", ["sl", "ax0"], ["u"]), node("Expand", ["u", "ex"], ["exd"]),
        node("Cast", ["ids"], ["f"], to=1), node("ReduceMean", ["f", "ax1"], ["rm"], keepdims=1),
        node("Pad", ["rm", "pads"], ["p"]), node("Split", ["exd"], ["a1", "a2"], axis=2, num_outputs=2),
        node("Sub", ["a1", "a2"], ["d"]), node("Where", ["c", "d", "zero"], ["y"]), node("CumSum", ["p", "one"], ["z"]),
    ]  # fmt: skip
    conv = [
        node("Conv", ["x", "k", "kb"], ["c1"], pads=[1, 1, 1, 1], strides=[1, 1], group=1),
        node("BatchNormalization", ["c1", "g", "be", "mu", "va"], ["bn"], epsilon=1e-3), node("Relu", ["bn"], ["r"]),
        node("MaxPool", ["r"], ["mp"], kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", ["mp"], ["gp"]), node("Flatten", ["gp"], ["fl"], axis=1),
        node("Clip", ["fl", "lo", "hi"], ["cl"]), node("Pow", ["cl", "two"], ["y"]),
    ]  # fmt: skip
    attention = [
        node("MatMul", ["x", "w"], ["qkv"]), node("Split", ["qkv", "parts"], ["q3", "k3", "v3"], axis=2),
        *(node("Reshape", [f"{n}3", "to"], [f"{n}4"]) for n in "qkv"),
        node("Transpose", ["q4"], ["q"], perm=[0, 2, 1, 3]), node("Transpose", ["k4"], ["k"], perm=[0, 2, 1, 3]),
        node("Transpose", ["v4"], ["v"], perm=[0, 2, 1, 3]), node("Attention", ["q", "k", "v"], ["o"], is_causal=1),
        node("Transpose", ["o"], ["ot"], perm=[0, 2, 1, 3]), node("Reshape", ["ot", "back"], ["ob"]),
        node("RMSNormalization", ["ob", "n"], ["rn"], axis=-1), node("Trilu", ["rn"], ["tr"], upper=0),
        node("ArgMax", ["tr"], ["y"], axis=-1, keepdims=0), node("Einsum", ["tr", "n"], ["z"], equation="bsd,d->bs"),
    ]  # fmt: skip
    return {
        "mlp": (mlp, [value("x", 3, 16)], [value("y", 3, 8)], {
            "w1": floats(32, 16), "b1": floats(32), "w2": floats(8, 32), "b2": floats(8), "n": floats(8),
            "nb": floats(8),
        }),
        "shapes": (shapes, [value("ids", 2, "s", kind=TensorProto.INT64)],
                   [value("y", 1, 2, 1, 3, 8), value("z", 2, 3)], {
            "table": floats(20, 16), "heads": ints(2, -1), "b": ints(0), "en": ints(3), "ax": ints(2), "st": ints(1),
            "ax0": ints(0), "ex": ints(1, 2, 2, 3, 8), "ax1": ints(1), "pads": ints(0, 1, 0, 1),
            "c": np.array([True, False] * 4), "zero": np.array(0.0, np.float32), "one": np.array(1, np.int64),
        }),
        "conv": (conv, [value("x", 2, 3, 8, 8)], [value("y", 2, 8)], {
            "k": floats(8, 3, 3, 3), "kb": floats(8), "g": floats(8), "be": floats(8), "mu": floats(8),
            "va": np.abs(floats(8)), "lo": np.array(0.0, np.float32), "hi": np.array(2.0, np.float32),
            "two": np.array(2.0, np.float32),
        }),
        "attention": (attention, [value("x", 1, 6, 16)], [value("y", 1, 6, kind=TensorProto.INT64), value("z", 1, 6)], {
            "w": floats(16, 48), "parts": ints(16, 16, 16), "to": ints(0, 0, 2, 8), "back": ints(0, 0, -1),
            "n": floats(16),
        }),
    }  # fmt: skip


def use(folder: Path) -> str:
    """Read a model, and run it on made-up inputs; say what came of it, ``other result`` where onnxruntime differs."""
    from gascompile.core.checks.machine_files import named_machine
    from gascompile.core.errors import GASCompileError
    from gascompile.integrations.onnx.outline_workload import workload_of_file
    from gascompile.integrations.onnx.translate import onnx_module
    from gascompile.weights.checkpoint import open_checkpoint

    file = folder / "m.onnx"
    checkpoint = open_checkpoint(file)
    module = onnx_module(file)
    sizes = [d for _, dims in module.inputs.values() for d in dims or () if isinstance(d, int)]
    if any(not 0 <= d <= 64 for d in sizes):
        return "read"
    # What is planned without torch is refused as plainly as what is run.
    with contextlib.suppress(GASCompileError):
        workload_of_file(file, named_machine("cpu-nvme"), batch=2, tokens=4)
    inputs = module.made_up_inputs(2, 4)
    torch.manual_seed(0)
    for name, value in inputs.items():
        if value.is_floating_point():
            inputs[name] = torch.randn(value.shape).to(value.dtype)
        elif value.dtype == torch.int64:
            inputs[name] = torch.randint(0, 3, value.shape)
    _with_values(module, checkpoint)
    with torch.no_grad():
        found = module(**inputs)
    expected = _by_runtime(file, inputs)
    if expected is None:
        return "we alone take it"
    leaves = found if isinstance(found, tuple) else (found,)
    return "same result" if _same(leaves, expected) else "other result"


def _with_values(module: Any, checkpoint: Any) -> None:
    """Put values into the weights of a model on the meta device."""
    for name, parameter in list(module.named_parameters()):
        source = checkpoint.sources[name]
        raw = bytearray()
        for extent in source.extents:
            with open(extent.path, "rb") as stream:
                stream.seek(extent.offset)
                raw += stream.read(extent.size_bytes)
        value = torch.frombuffer(raw, dtype=parameter.dtype).reshape(parameter.shape)
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(
            value, requires_grad=False
        )


def _by_runtime(file: Path, inputs: Mapping[str, torch.Tensor]) -> list[Any] | None:
    import onnxruntime

    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )
        given = {name: value.numpy() for name, value in inputs.items()}
        return list(session.run(None, given))
    except Exception:  # noqa: BLE001 - whatever onnxruntime refuses for, and in whatever way
        return None


def _same(found: Any, expected: list[Any]) -> bool:
    if len(found) != len(expected):
        return False
    for ours, theirs in zip(found, expected, strict=True):
        other = torch.from_numpy(np.array(theirs))
        if ours.dtype != other.dtype or ours.shape != other.shape:
            return False
        if not torch.allclose(ours.double(), other.double(), rtol=1e-3, atol=1e-4, equal_nan=True):
            return False
    return True
