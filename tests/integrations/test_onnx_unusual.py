"""ONNX files that are valid and odd: numbers below zero, single numbers, names that modules have themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gascompile
from gascompile.cli import app
from gascompile.core.errors import CheckpointError, UnsupportedOpError
from gascompile.integrations.onnx.translate import onnx_module
from gascompile.weights.onnx_file import weight_name

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
runtime = pytest.importorskip("onnxruntime")


def build(
    nodes: list[Any], inputs: list[Any], outputs: list[Any], initializers: list[Any], file: Path
) -> Path:
    graph = onnx.helper.make_graph(nodes, "g", inputs, outputs, initializers)
    opsets = [onnx.helper.make_opsetid("", 20)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), file)
    return file


def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> Any:
    return onnx.helper.make_node(op, inputs, outputs, **attributes)


def value(name: str, shape: list[Any] | None, kind: int = 1) -> Any:
    return onnx.helper.make_tensor_value_info(name, kind, shape)


def constant(name: str, content: Any, dtype: torch.dtype = torch.int64) -> Any:
    return onnx.numpy_helper.from_array(torch.tensor(content, dtype=dtype).numpy(), name)


def by_runtime(file: Path, x: torch.Tensor) -> list[torch.Tensor]:
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(found) for found in session.run(None, {"x": x.numpy()})]


def test_sizes_that_change_are_cut_towards_zero_and_compared_as_booleans(tmp_path: Path) -> None:
    nodes = [
        node("Shape", ["x"], ["s"], end=1),
        node("Sub", ["s", "six"], ["d"]),
        node("Div", ["d", "two"], ["half"]),
        node("Div", ["s", "two"], ["rows"]),
        node("Slice", ["x", "zero", "rows"], ["y"]),
        node("Equal", ["s", "five"], ["e"]),
    ]
    outputs = [value("half", [1], 7), value("e", [1], 9), value("y", ["n", 4])]
    numbers = [constant(n, [v]) for n, v in (("zero", 0), ("two", 2), ("five", 5), ("six", 6))]
    file = build(nodes, [value("x", ["b", 4])], outputs, numbers, tmp_path / "m.onnx")
    compiled = gascompile.compile(file, "1MiB", machine="emulated", cache_dir=tmp_path / "cache")
    for rows in (2, 3, 4, 5, 7, 9, 11):
        x = torch.randn(rows, 4)
        for found, expected in zip(compiled(x), by_runtime(file, x), strict=True):
            torch.testing.assert_close(found, expected)


def test_the_norm_of_a_single_number_is_positive(tmp_path: Path) -> None:
    nodes = [
        node("ReduceSum", ["x"], ["s"], keepdims=0),
        node("ReduceL2", ["s"], ["y"], keepdims=0),
    ]
    file = build(nodes, [value("x", [3])], [value("y", [])], [], tmp_path / "m.onnx")
    x = torch.tensor([1.0, -2, -3])
    torch.testing.assert_close(onnx_module(file)(x), by_runtime(file, x)[0])


def test_an_empty_list_of_axes_to_squeeze_is_refused(tmp_path: Path) -> None:
    nodes = [node("Squeeze", ["x", "a"], ["y"])]
    nothing = onnx.numpy_helper.from_array(torch.zeros(0, dtype=torch.int64).numpy(), "a")
    file = build(nodes, [value("x", [1, 3])], [value("y", [1, 3])], [nothing], tmp_path / "m.onnx")
    with pytest.raises(UnsupportedOpError, match="list of axes is empty"):
        onnx_module(file)(torch.ones(1, 3))


@pytest.mark.parametrize("name", ["outputs", "forward.type", "_parameters", "onnx_constant_0"])
def test_weights_may_have_the_names_of_a_module(name: str, tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", name], ["p"]), node("Mul", ["p", "k"], ["y"])]
    weights = [
        constant(name, torch.randn(8, 8).tolist(), torch.float32),
        constant("k", [2.0], torch.float32),
    ]
    file = build(nodes, [value("x", [2, 8])], [value("y", [2, 8])], weights, tmp_path / "m.onnx")
    compiled = gascompile.compile(file, "1MiB", cache_dir=tmp_path / "cache")
    x = torch.randn(2, 8)
    torch.testing.assert_close(compiled(x), by_runtime(file, x)[0])


_TAKEN = """
import sys
from pathlib import Path
from gascompile.integrations.onnx.translate import onnx_module
print(*dir(onnx_module(Path(sys.argv[1]))))
"""


def test_all_that_a_module_has_is_known(tmp_path: Path) -> None:
    nodes = [node("Neg", ["x"], ["y"])]
    file = build(nodes, [value("x", [1])], [value("y", [1])], [], tmp_path / "m.onnx")
    # In a process of its own: libraries give torch's modules more as they are imported.
    command = [sys.executable, "-c", _TAKEN, str(file)]
    taken = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "forward" in taken
    assert not {weight_name(name, set()) for name in taken} & set(taken)


def test_a_model_without_an_op(tmp_path: Path) -> None:
    class Nothing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    x = torch.ones(3)
    compiled = gascompile.compile(Nothing(), "1MiB", machine="emulated", cache_dir=tmp_path)
    assert torch.equal(compiled(x), x)


@pytest.mark.parametrize(("begin", "end", "step"), [(-99, -99, -1), (-99, -99, -3), (9, 0, -2)])
def test_sizes_are_taken_backwards_as_values_are(
    begin: int, end: int, step: int, tmp_path: Path
) -> None:
    nodes = [node("Shape", ["x"], ["s"]), node("Slice", ["s", "b", "e", "a", "t"], ["y"])]
    ends = (("b", begin), ("e", end), ("a", 0), ("t", step))
    numbers = [constant(name, [number]) for name, number in ends]
    file = build(nodes, [value("x", [2, 3, 4])], [value("y", ["n"], 7)], numbers, tmp_path / "m.onnx")  # fmt: skip
    x = torch.zeros(2, 3, 4)
    assert torch.equal(onnx_module(file)(x), by_runtime(file, x)[0])


@pytest.mark.parametrize("of_sizes", [False, True])
def test_backwards_without_an_end_is_refused(of_sizes: bool, tmp_path: Path) -> None:
    """In onnxruntime that is all up to the first value, and by ONNX's own rules nothing."""
    given = "s" if of_sizes else "x"
    nodes = [node("Shape", ["x"], ["s"]), node("Slice", [given, "b", "e", "a", "b"], ["y"])]
    numbers = [constant("b", [-1]), constant("e", [2**63 - 1]), constant("a", [0])]
    outputs = [value("y", ["n"] if of_sizes else ["n", 4], 7 if of_sizes else 1)]
    file = build(nodes, [value("x", [3, 4])], outputs, numbers, tmp_path / "m.onnx")
    with pytest.raises(UnsupportedOpError, match="goes backwards to 9223372036854775807"):
        onnx_module(file)(torch.ones(3, 4))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_the_sign_of_nan_is_nan(kind: torch.dtype, tmp_path: Path) -> None:
    number = onnx.helper.np_dtype_to_tensor_dtype(torch.zeros(1, dtype=kind).numpy().dtype)
    ends = [value(name, [19], number) for name in "xy"]
    file = build([node("Sign", ["x"], ["y"])], ends[:1], ends[1:], [], tmp_path / "m.onnx")
    x = torch.linspace(-1, 1, 19, dtype=kind)
    x[::4] = NAN
    torch.testing.assert_close(onnx_module(file)(x), by_runtime(file, x)[0], equal_nan=True)


@pytest.mark.parametrize("limits", [(NAN, 0.5), (-0.5, NAN), (NAN, NAN), (0.5, -0.5), (-0.5, INF)])
@pytest.mark.parametrize("computed", [False, True])
def test_a_limit_that_is_nan_is_none(
    limits: tuple[float, float], computed: bool, tmp_path: Path
) -> None:
    nodes = [node("Clip", ["x", "low", "high"], ["y"])]
    held = [constant(n, v, torch.float32) for n, v in zip(("low", "high"), limits, strict=True)]
    if computed:
        # The last values of the input are its limits.
        nodes[:0] = [node("Gather", ["x", "last"], ["low"]), node("Gather", ["x", "end"], ["high"])]
        held = [constant("last", -2), constant("end", -1)]
    file = build(nodes, [value("x", [11])], [value("y", [11])], held, tmp_path / "m.onnx")
    x = torch.tensor([NAN, -INF, INF, *torch.linspace(-1, 1, 6), *limits])
    torch.testing.assert_close(onnx_module(file)(x), by_runtime(file, x)[0], equal_nan=True)


@pytest.mark.parametrize("has_type", [False, True])
def test_an_output_needs_no_shape(has_type: bool, tmp_path: Path) -> None:
    output = value("y", None) if has_type else onnx.ValueInfoProto(name="y")
    weight = constant("w", torch.randn(8, 8).tolist(), torch.float32)
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    whole = build(nodes, [value("x", ["b", 8])], [output], [weight], tmp_path / "w.onnx")
    file = tmp_path / "m.onnx"
    onnx.save(onnx.load(whole), file, save_as_external_data=True, size_threshold=0)
    compiled = gascompile.compile(file, "1MiB", machine="emulated", cache_dir=tmp_path / "cache")
    x = torch.randn(3, 8)
    torch.testing.assert_close(compiled(x), by_runtime(file, x)[0])
    compiled.close()
    planned = tmp_path / "planned.onnx"
    options = ["--budget", "1MiB", "--machine", "emulated", "--cache-dir", str(tmp_path / "cache")]
    done = CliRunner().invoke(app, ["plan", str(file), "--onnx", str(planned), *options])
    assert done.exit_code == 0, done.output
    torch.testing.assert_close(by_runtime(planned, x)[0], by_runtime(file, x)[0])


@pytest.mark.parametrize("shape", [None, ["b", 8]])
@pytest.mark.parametrize("kind", ["link", "several names"])
def test_links_to_data_are_refused(shape: list[Any] | None, kind: str, tmp_path: Path) -> None:
    weight = constant("w", torch.randn(8, 8).tolist(), torch.float32)
    ends = [value("x", ["b", 8]), value("y", shape)]
    whole = build([node("MatMul", ["x", "w"], ["y"])], ends[:1], ends[1:], [weight], tmp_path / "w.onnx")  # fmt: skip
    file, data = tmp_path / "m.onnx", tmp_path / "m.data"
    onnx.save(onnx.load(whole), file, save_as_external_data=True, size_threshold=0, location=data.name)  # fmt: skip
    if kind == "link":
        data.rename(tmp_path / "other")
        data.symlink_to("other")
    else:
        (tmp_path / "other").hardlink_to(data)
    with pytest.raises(CheckpointError, match="link"):
        onnx_module(file)


def test_an_input_without_a_shape_is_refused(tmp_path: Path) -> None:
    ends = [value("x", None), value("y", None)]
    file = build([node("Relu", ["x"], ["y"])], ends[:1], ends[1:], [], tmp_path / "m.onnx")
    with pytest.raises(UnsupportedOpError, match="the input 'x' is FLOAT of the shape None"):
        onnx_module(file)
