"""ONNX files planned without torch: the same ops, sizes, memory and seconds as those of a capture with torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gascompile
from gascompile.api import plan as planning
from gascompile.api.model_planning import annotated_source
from gascompile.core.checks.machine_files import named_machine
from gascompile.core.config import CompileConfig
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.workload import Workload
from gascompile.integrations.onnx.outline_workload import workload_of_file
from gascompile.integrations.onnx.table import OPS
from tests.integrations.onnx_models import INPUTS, net, onnx

MACHINE = named_machine("cpu-nvme")
X, IMAGE, IDS = [2, 3, 4], [2, 8, 6, 6], [2, 3]
FLOATS = {
    "x": X, "other": [3, 1], "image": IMAGE, "rows": [2, 3, 5, 8], "kernel": [6, 8, 3, 3], "line": [6, 4, 3],
    "bias": [6], "c8": [8], "c4": [4], "square": [4, 4], "matrix": [5, 4], "vector": [4], "batches": [2, 4, 5],
    "queries": [2, 4, 5, 8], "keys": [2, 4, 6, 8], "few": [2, 2, 6, 8], "mask": [2, 1, 5, 6], "depth": [8, 1, 3, 3],
    "flat": [6, 4], "single": [],
}  # fmt: skip
NUMBERS = {
    "a0": [0], "a1": [1], "last": [-1], "to": [4, 6], "wide": [2, 2, 3, 4], "two": [2, 1],
    "pads": [0, 1, 0, 0, 1, 2], "b": [0, 1], "e": [9, -1], "axes": [0, 2], "back": [-1], "stop": [-9], "step": [-2],
    "at": [-2], "repeat": [1, 2, 3], "many": list(range(80)),
}  # fmt: skip
UNARY = (
    "Abs Ceil Cos Erf Exp Floor HardSwish IsNaN Log Reciprocal Relu Round Sigmoid Sign Sin Softplus Sqrt Tanh Neg Elu "
    "LeakyRelu Gelu Softmax LogSoftmax Flatten Transpose ReduceL2 ReduceSum"
)
NODES: list[tuple[str, str, dict[str, Any]]] = [
    *((op, "x", {}) for op in UNARY.split()),
    *((op, "x other", {}) for op in ("Add", "Sub", "Mul", "Div", "Max", "Equal", "Less", "GreaterOrEqual")),
    ("Not", "flags", {}), ("And", "flags flags", {}), ("Where", "flags x other", {}),
    ("Mod", "x other", {"fmod": 1}), ("Mod", "ids ids", {}), ("Div", "ids ids", {}), ("Pow", "x other", {}),
    ("Clip", "x low", {}), ("Cast", "x", {"to": 7}), ("Cast", "x", {"to": 10}), ("Cast", "ids", {"to": 9}),
    ("ReduceMean", "x axes", {"keepdims": 0}), ("ReduceMax", "x a1", {}), ("ReduceMin", "x a1", {}),
    ("ArgMax", "x", {"axis": 1}), ("CumSum", "x axis", {}), ("Reshape", "x to", {}), ("Squeeze", "x1", {}),
    ("Unsqueeze", "x axes", {}), ("Expand", "x wide", {}), ("Tile", "x repeat", {}), ("Concat", "x x", {"axis": 1}),
    ("Pad", "x pads", {}), ("Slice", "x b e axes", {}), ("Slice", "x back stop last step", {}),
    ("Gather", "x at", {"axis": 2}), ("Gather", "flat ids", {}), ("Gather", "flat many2", {}),
    ("GatherElements", "x spots", {"axis": 2}), ("GatherND", "x pairs", {}), ("ScatterND", "x pairs x_pairs", {}),
    ("ScatterElements", "x spots x_spots", {"axis": 2}),
    ("ScatterElements", "x spots x_spots", {"axis": 2, "reduction": "add"}), ("Trilu", "square", {"upper": 0}),
    ("Trilu", "square", {}), ("Range", "r0 r5 r1", {}), ("ConstantOfShape", "to", {}), ("Identity", "x", {}),
    ("MatMul", "x square", {}), ("MatMul", "x vector", {}), ("MatMul", "vector square", {}),
    ("MatMul", "matrix square", {}), ("MatMul", "matrix batches", {}), ("MatMul", "x batches", {}),
    ("Gemm", "matrix square c4", {}), ("Gemm", "matrix square c4", {"transB": 1}),
    ("Gemm", "matrix square", {"alpha": 0.5}), ("Gemm", "matrix matrix", {"transA": 1}),
    ("Einsum", "queries keys", {"equation": "bhqd,bhkd->bhqk"}), ("LayerNormalization", "x c4 c4", {}),
    ("LayerNormalization", "rows c8", {"axis": 3}), ("RMSNormalization", "x c4", {}),
    ("GroupNormalization", "image c8 c8", {"num_groups": 2}), ("BatchNormalization", "image c8 c8 c8 c8", {}),
    ("Conv", "image kernel bias", {"pads": [1, 1, 1, 1]}),
    ("Conv", "image kernel", {"strides": [2, 2], "dilations": [2, 2]}), ("Conv", "image depth", {"group": 8}),
    ("Conv", "image kernel", {"pads": [0, 0, 1, 1]}), ("Conv", "batches line", {"pads": [1, 1]}),
    ("MaxPool", "image", {"kernel_shape": [2, 2], "strides": [2, 2]}), ("GlobalAveragePool", "image", {}),
    ("Attention", "queries keys keys", {}), ("Attention", "queries keys keys mask", {}),
    ("Attention", "queries keys keys flags4", {}), ("Attention", "queries keys keys", {"is_causal": 1}),
    ("ArgMin", "x", {"axis": 0}), ("Dropout", "x", {}), ("Greater", "x other", {}), ("LessOrEqual", "x other", {}),
    ("Min", "x other", {}), ("Sum", "x other x", {}), ("Or", "flags flags", {}), ("Xor", "flags flags", {}),
    ("Clip", "x single", {}), ("Size", "x", {}), ("Shape", "x", {}),
]  # fmt: skip


def all_ops(folder: Path) -> Path:
    """Write a graph in which each node is a branch of its own."""
    helper, array = onnx.helper, onnx.numpy_helper.from_array
    kinds = {"ids": 7, "spots": 7, "pairs": 7, "flags": 9, "flags4": 9}
    shapes = {
        **FLOATS, "ids": IDS, "flags": X, "flags4": [2, 1, 5, 6], "spots": [2, 3, 2], "x_spots": [2, 3, 2],
        "pairs": [5, 2], "x_pairs": [5, 4], "x1": [2, 1, 4], "many2": [2, 40], "ids3": [3], "flags3": [3],
    }  # fmt: skip
    kinds |= {"many2": 7, "ids3": 7, "flags3": 9}
    inputs = [helper.make_tensor_value_info(n, kinds.get(n, 1), s) for n, s in shapes.items()]
    held = [array(torch.tensor(v, dtype=torch.int64).numpy(), n) for n, v in NUMBERS.items()]
    held += [array(torch.tensor(v).numpy(), n) for n, v in (("r0", 0), ("r5", 5), ("r1", 1), ("axis", 1))]  # fmt: skip
    held.append(array(torch.tensor(-1.0).numpy(), "low"))
    nodes = [
        helper.make_node(op, given.split(), [f"y{i}"], name=f"{op}{i}", **attributes)
        for i, (op, given, attributes) in enumerate(NODES)
    ]
    nodes.append(helper.make_node("Split", ["image"], ["part0", "part1"], axis=1, num_outputs=2))
    # Sizes as a tensor that is read, and as one that is returned.
    nodes.append(helper.make_node("Where", ["flags3", f"y{len(NODES) - 1}", "ids3"], ["sizes"]))
    used = {name for node in nodes for name in node.input}
    inputs = [value for value in inputs if value.name in used]
    # Of these ONNX infers no type.
    typed = {"Attention": FLOATS["queries"], "RMSNormalization": X, "GroupNormalization": IMAGE}
    outputs = [
        helper.make_tensor_value_info(f"y{i}", 1, typed[op])
        if op in typed
        else onnx.ValueInfoProto(name=f"y{i}")
        for i, (op, _, _) in enumerate(NODES)
    ]
    outputs += [onnx.ValueInfoProto(name=name) for name in ("sizes", "part0", "part1")]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [t for t in held if t.name in used])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    onnx.save(inferred, folder / "ops.onnx")
    return folder / "ops.onnx"


def both(
    file: Path, cache: Path, *, batch: int = 1, tokens: int = 128, machine: Any = MACHINE
) -> tuple[Workload, Workload]:
    """Return the workload of a capture with torch, and that of outlines."""
    shape = (batch, tokens)
    captured = annotated_source(str(file), machine, CompileConfig(cache_dir=cache), shape=shape)
    return captured[2].workload, workload_of_file(file, machine, batch=batch, tokens=tokens)


def assert_same(captured: Workload, outlined: Workload) -> None:
    for wanted, found in zip(captured.ops, outlined.ops, strict=False):
        assert (found.name, found) == (wanted.name, wanted), (found, wanted)
    assert len(outlined.ops) == len(captured.ops)
    assert outlined == captured


def test_each_op_is_that_of_a_capture(tmp_path: Path) -> None:
    assert OPS.keys() == {op for op, _, _ in NODES} | {"Split"}
    captured, outlined = both(all_ops(tmp_path), tmp_path / "c")
    assert_same(captured, outlined)


_WITHOUT_TORCH = """
import sys
class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("there is no torch here")
sys.meta_path.insert(0, Refuses())
from gascompile.cli import main
main()
"""


def without_torch(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _WITHOUT_TORCH, *args]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=root)


def test_a_file_is_planned_in_a_process_without_torch(root: Path, tmp_path: Path) -> None:
    """The plan is that of a process with torch: every field but what it is looked up by."""
    shapes = {"ids": {1: torch.export.Dim("tokens", min=2, max=64)}, "shift": None}
    file = gascompile.export(net(), tmp_path / "m.onnx", INPUTS, dynamic_shapes=shapes).written.file
    args = ["--budget", "200KiB", "--machine", "cpu-nvme", "--tokens", "9", "--json"]
    done = without_torch(root, "plan", str(file), *args, "-o", str(tmp_path / "p.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = gascompile.Plan.load(tmp_path / "p.json")
    assert json.loads(done.stdout)["certificate"]["predicted_s"] == found.certificate.predicted_s
    wanted = planning.plan(str(file), "200KiB", "cpu-nvme", tokens=9, cache_dir=tmp_path)
    assert found.workload == wanted.workload
    assert (found.steps, found.ops, found.tensors) == (wanted.steps, wanted.ops, wanted.tensors)
    assert found.certificate.predicted_s == wanted.certificate.predicted_s
    assert found.peak_bytes == wanted.peak_bytes and found.budget_bytes == wanted.budget_bytes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--machine", "cpu-nvme", "--weights", "int8"], "torch is not installed"),
        (["--machine", "cpu-nvme", "--sites", "all"], "install torch"),
        ([], "--machine"),
    ],
)
def test_what_needs_torch_says_so(
    options: list[str], says: str, root: Path, tmp_path: Path
) -> None:
    file = all_ops(tmp_path)
    done = without_torch(root, "plan", str(file), *options)
    assert done.returncode == 1 and says in done.stdout + done.stderr


def test_what_outlines_do_not_know_is_refused(tmp_path: Path) -> None:
    helper = onnx.helper
    nodes = [helper.make_node("Einsum", ["x", "x", "x"], ["y"], name="it", equation="ij,jk,kl->il")]
    ends = [helper.make_tensor_value_info(n, 1, [3, 3]) for n in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(UnsupportedOpError, match=r"'it' \(Einsum\).*install torch"):
        workload_of_file(tmp_path / "m.onnx", MACHINE, batch=1, tokens=1)


def test_a_graphics_processor_repeats_keys(tmp_path: Path) -> None:
    """Where the captured program of a GPU copies keys for groups of queries, so do outlines."""
    gpu = named_machine("rtx4090-gen4")
    file = gascompile.export(Grouped(), tmp_path / "g.onnx", (torch.zeros(2, 5, 16),)).written.file
    counts = []
    for machine in (gpu, MACHINE):
        captured, outlined = both(file, tmp_path / "c", machine=machine)
        assert_same(captured, outlined)
        counts.append(len(outlined.ops))
    assert counts[0] > counts[1]


class Grouped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = x.unflatten(-1, (4, 4)).transpose(1, 2)
        keys = self.keys(x).unflatten(-1, (2, 4)).transpose(1, 2)
        keys = keys[:, :, None].expand(2, 2, 2, 5, 4).reshape(2, 4, 5, 4)
        return torch.nn.functional.scaled_dot_product_attention(queries, keys, keys)
