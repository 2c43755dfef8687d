"""ONNX models: read in place, planned and run as modules are; other ops are refused by name."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import CaptureError, CheckpointError, UnsupportedOpError
from gascompile.integrations.onnx.translate import onnx_module
from gascompile.weights.checkpoint import open_checkpoint

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")

BUDGET = 900 << 10


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]
    return nn.Sequential(*layers, nn.LayerNorm(256), nn.Linear(256, 32)).eval()


def export(model: nn.Module, inputs: tuple[Any, ...], file: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, inputs, dynamo=True, verbose=False, **options)
        assert program is not None
        program.save(str(file), external_data=True)
    return file


def by_runtime(file: Path, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    found = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    return [torch.from_numpy(value) for value in found]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(mlp(), (torch.zeros(3, 256),), tmp_path_factory.mktemp("onnx") / "m.onnx")


def test_an_exported_model_runs_below_its_weights_from_its_own_data(
    exported: Path, tmp_path: Path
) -> None:
    x = torch.randn(3, 256)
    (name,) = onnx_module(exported).inputs
    weights = sum(s.size_bytes for s in open_checkpoint(exported).sources.values())
    assert weights > BUDGET
    compiled = gascompile.compile(exported, BUDGET, machine="emulated", cache_dir=tmp_path)
    found = compiled(x)
    torch.testing.assert_close(found, mlp()(x))
    torch.testing.assert_close(found, by_runtime(exported, {name: x})[0], rtol=1e-4, atol=1e-5)
    compiled.close()
    copies = sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors"))
    assert copies < weights / 10


def build(
    nodes: list[Any], inputs: list[Any], outputs: list[Any], initializers: list[Any], file: Path
) -> Path:
    graph = onnx.helper.make_graph(nodes, "g", inputs, outputs, initializers)
    opsets = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("com.other", 1)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), file)
    return file


def value(name: str, shape: list[int] | None, kind: int = 1) -> Any:
    return onnx.helper.make_tensor_value_info(name, kind, shape)


def constant(name: str, content: Any, dtype: torch.dtype = torch.int64) -> Any:
    return onnx.numpy_helper.from_array(torch.tensor(content, dtype=dtype).numpy(), name)


def ints(**named: Any) -> list[Any]:
    return [constant(name, content) for name, content in named.items()]


X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)
CASES: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("Softmax", {"axis": 1}, []), ("Softmax", {}, []), ("LogSoftmax", {"axis": 0}, []), ("Gelu", {}, []),
    ("Gelu", {"approximate": "tanh"}, []), ("Transpose", {}, []), ("Transpose", {"perm": [1, 2, 0]}, []),
    ("Flatten", {"axis": 2}, []), ("Flatten", {"axis": -1}, []), ("Flatten", {"axis": 0}, []),
    ("Reshape", {}, ints(s=[0, -1])), ("Reshape", {"allowzero": 1}, ints(s=[4, 6])),
    ("Slice", {}, ints(b=[-1], e=[-9], a=[2], s=[-2])), ("Slice", {}, ints(b=[0, 1], e=[9, -1], a=[0, -1])),
    ("Slice", {}, ints(b=[9], e=[-(2**63)], a=[2], s=[-1])), ("Slice", {}, ints(b=[-99], e=[2**63 - 1], a=[1], s=[2])),
    ("Slice", {}, ints(b=[-99, 99], e=[-99, -2], a=[2, 0], s=[-1, -1])),
    ("Gather", {"axis": 1}, ints(i=[-1, 0])), ("Gather", {"axis": -1}, ints(i=-2)),
    ("Unsqueeze", {}, ints(a=[-1, 0])), ("Pad", {}, [*ints(p=[0, 1, -1, 0, 2, 1]), constant("v", 3.5, torch.float32)]),
    ("Pad", {}, [*ints(p=[1, 2]), constant("v", 1.0, torch.float32), *ints(a=[-1])]),
    ("Clip", {}, [constant("l", -1.0, torch.float32)]), ("ReduceMean", {"keepdims": 0}, ints(a=[-1, 0])),
    ("ReduceSum", {}, []), ("ReduceMax", {}, ints(a=[1])), ("ReduceL2", {}, ints(a=[1])), ("CumSum", {}, ints(a=-1)),
    ("ArgMax", {"axis": 1, "keepdims": 0}, []), ("Trilu", {"upper": 0}, ints(k=-1)), ("Trilu", {}, ints(k=1)),
    ("Tile", {}, ints(r=[1, 2, 3])), ("Expand", {}, ints(s=[2, 1, 1, 4])), ("Elu", {"alpha": 0.5}, []),
    ("LeakyRelu", {}, []), ("Pow", {}, [constant("p", 3, torch.int64)]), ("Round", {}, []), ("Sign", {}, []),
    ("LayerNormalization", {"axis": 1, "epsilon": 0.1}, [constant("s", [1.0, 2, 3, 4], torch.float32)]),
    ("Cast", {"to": 7}, []), ("Cast", {"to": 9}, []), ("Mod", {"fmod": 1}, [constant("m", 0.7, torch.float32)]),
    ("GatherElements", {"axis": 2}, ints(i=[[[-1, 0]], [[1, 2]]])), ("Shape", {"start": -2}, []),
    ("GatherND", {"batch_dims": 1}, ints(i=[[-1], [0]])), ("Squeeze", {}, []), ("Size", {}, []),
    ("ConvTranspose", {}, []), ("HardSwish", {}, []), ("IsNaN", {}, []), ("Erf", {}, []),
]  # fmt: skip


@pytest.mark.parametrize(("op", "attributes", "others"), [c for c in CASES if c[0] != "ConvTranspose"])  # fmt: skip
def test_an_op_does_what_the_runtime_does(
    op: str, attributes: dict[str, Any], others: list[Any], tmp_path: Path
) -> None:
    if len(others) == 3 and op == "Pad":
        names = ["x", "p", "v", "a"]
    elif op == "Clip":
        names = ["x", "l"]
    else:
        names = ["x", *(o.name for o in others)]
    node = onnx.helper.make_node(op, names, ["y"], name="it", **attributes)
    proto = onnx.helper.make_model(
        onnx.helper.make_graph(
            [node], "g", [value("x", [2, 3, 4])], [onnx.ValueInfoProto(name="y")], others
        ),
        opset_imports=[onnx.helper.make_opsetid("", 20)],
    )
    found = next(o for o in onnx.shape_inference.infer_shapes(proto).graph.output)
    file = build([node], [value("x", [2, 3, 4])], [found], others, tmp_path / "o.onnx")
    (expected,) = by_runtime(file, {"x": X})
    torch.testing.assert_close(onnx_module(file)(X), expected)


@pytest.mark.parametrize(
    ("trans_a", "trans_b", "alpha", "beta", "shape"),
    [(0, 0, 1.0, 1.0, [5]), (1, 1, 0.5, 2.0, [3, 1]), (0, 1, 1.0, 1.0, [5]), (0, 1, 1.0, 1.0, [1])],
)  # fmt: skip
def test_gemm(
    trans_a: int, trans_b: int, alpha: float, beta: float, shape: list[int], tmp_path: Path
) -> None:
    a = torch.randn(4, 3) if trans_a else torch.randn(3, 4)
    b = constant("b", torch.randn(5, 4).tolist() if trans_b else torch.randn(4, 5).tolist(), torch.float32)  # fmt: skip
    c = constant("c", torch.randn(shape).tolist(), torch.float32)
    options = {"transA": trans_a, "transB": trans_b, "alpha": alpha, "beta": beta}
    node = onnx.helper.make_node("Gemm", ["x", "b", "c"], ["y"], **options)
    file = build([node], [value("x", list(a.shape))], [value("y", [3, 5])], [b, c], tmp_path / "g.onnx")  # fmt: skip
    torch.testing.assert_close(onnx_module(file)(a), by_runtime(file, {"x": a})[0])


@pytest.mark.parametrize(
    ("op", "domain", "attributes", "says"),
    [
        ("Own", "com.other", {}, "'it' (Own) of the domain 'com.other'"),
        ("Softsign", "", {}, "'it' (Softsign)"),
        ("BatchNormalization", "", {"training_mode": 1}, "'training_mode' of the ONNX node 'it'"),
        ("Cast", "", {"to": 12}, "casts to UINT32"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    op: str, domain: str, attributes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    names = ["x", "c", "c", "c", "c"] if op == "BatchNormalization" else ["x"]
    outs = ["y", "m", "v"] if op == "BatchNormalization" else ["y"]
    node = onnx.helper.make_node(op, names, outs, name="it", domain=domain, **attributes)
    held = [constant("c", [1.0, 1, 1], torch.float32)]
    file = build(
        [node], [value("x", [2, 3, 4])], [value("y", [2, 3, 4], 12 if op == "Cast" else 1)], held, tmp_path / "u.onnx"
    )  # fmt: skip
    with pytest.raises(UnsupportedOpError) as error:
        onnx_module(file)
    assert says in str(error.value)


@pytest.mark.parametrize("spoil", ["truncated", "gone", "outside", "garbage", "length"])
def test_a_damaged_file_is_refused(exported: Path, spoil: str, tmp_path: Path) -> None:
    proto = onnx.load(exported, load_external_data=False)
    data = (exported.parent / "m.onnx.data").read_bytes()
    where = tmp_path / "deep"
    where.mkdir()
    if spoil == "truncated":
        data = data[:-4]
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if spoil == "outside" and entry.key == "location":
                entry.value = "../m.onnx.data"
            if spoil == "length" and entry.key == "length":
                entry.value = str(int(entry.value) - 4)
    raw = proto.SerializeToString()
    (where / "m.onnx").write_bytes(raw[: len(raw) // 2] if spoil == "garbage" else raw)
    if spoil != "gone":
        ((tmp_path if spoil == "outside" else where) / "m.onnx.data").write_bytes(data)
    with pytest.raises(CheckpointError):
        open_checkpoint(where / "m.onnx")


def test_weights_within_the_model_file_are_read_in_place(exported: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.onnx"
    onnx.save(onnx.load(exported), whole)
    x = torch.randn(3, 256)
    found = open_checkpoint(whole)
    assert {e.path for s in found.sources.values() for e in s.extents} == {str(whole.resolve())}
    compiled = gascompile.compile(whole, BUDGET, machine="emulated", cache_dir=tmp_path / "c")
    torch.testing.assert_close(compiled(x), mlp()(x))
    compiled.close()


def test_another_shape_than_the_file_declares_is_refused(exported: Path, tmp_path: Path) -> None:
    compiled = gascompile.compile(exported, BUDGET, machine="emulated", cache_dir=tmp_path)
    with pytest.raises(CaptureError, match="where the model has"):
        compiled(torch.randn(4, 256))


def transformer(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    small = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 128}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    ids = torch.randint(0, 200, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    text = {"input_ids": ids, "attention_mask": mask}
    made: Any
    if name == "llama":
        config = transformers.LlamaConfig(**small, num_key_value_heads=2, use_cache=False)
        made, inputs = transformers.LlamaForCausalLM(config), text
    elif name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=200, n_embd=64, n_layer=2, n_head=4, use_cache=False
        )
        made, inputs = transformers.GPT2LMHeadModel(config), text
    elif name == "bert":
        made, inputs = transformers.BertModel(transformers.BertConfig(**small)), text
    elif name == "vit":
        del small["vocab_size"]
        config = transformers.ViTConfig(**small, image_size=32, patch_size=8)
        made, inputs = transformers.ViTModel(config), {"pixel_values": torch.randn(1, 3, 32, 32)}
    else:
        config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])
        made = transformers.ResNetModel(config)
        inputs = {"pixel_values": torch.randn(1, 3, 32, 32)}
    return made.eval(), inputs


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [slow("gpt2"), slow("vit"), "llama", "bert", "resnet"])
def test_exports_of_model_families_run_as_the_models_do(name: str, tmp_path: Path) -> None:
    model, inputs = transformer(name)
    shapes = None
    if name == "bert":
        dims = {1: torch.export.Dim("tokens", min=2, max=64)}
        shapes = dict.fromkeys(inputs, dims)
    file = export(model, (), tmp_path / "m.onnx", kwargs=inputs, dynamic_shapes=shapes)
    compiled = gascompile.compile(file, machine="emulated", cache_dir=tmp_path / "c")
    if name == "bert":
        longer = {key: torch.cat([value, value], 1) for key, value in inputs.items()}
        found = compiled(**longer)
        torch.testing.assert_close(found[0], model(**longer)[0], rtol=1e-4, atol=1e-4)
    found = compiled(**inputs)
    found = found[0] if isinstance(found, tuple) else found
    with torch.no_grad():
        torch.testing.assert_close(found, model(**inputs)[0], rtol=1e-4, atol=1e-4)
    compiled.close()


def test_another_attribute_is_another_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for axis in (1, 2):
        node = onnx.helper.make_node("Softmax", ["x"], ["y"], axis=axis)
        file = build([node], [value("x", [2, 3, 4])], [value("y", [2, 3, 4])], [], tmp_path / "s.onnx")  # fmt: skip
        compiled = gascompile.compile(file, machine="emulated", cache_dir=tmp_path / "c")
        found.append(compiled(X))
        torch.testing.assert_close(found[-1], torch.softmax(X, axis))
        compiled.close()
    assert "not kept" not in caplog.text


def test_defaults_are_those_of_the_standard() -> None:
    import inspect

    from gascompile.integrations.onnx.table import MAX_OPSET, OPS

    for name, op in OPS.items():
        said = onnx.defs.get_schema(name, MAX_OPSET).attributes
        for option in inspect.signature(op.compute).parameters.values():
            if option.kind is option.KEYWORD_ONLY and option.name in said:
                default = said[option.name].default_value
                if not default.name or name == "ConstantOfShape":
                    continue
                value = onnx.helper.get_attribute_value(default)
                value = value.decode() if isinstance(value, bytes) else value
                assert option.default == value, (name, option.name)


@pytest.mark.parametrize("verb", [["plan"], ["run", "--check"]])
def test_the_command_line_takes_the_file(exported: Path, verb: list[str], tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from gascompile.cli import app

    options = ["--budget", "900KiB", "--machine", "emulated", "--cache-dir", str(tmp_path)]
    done = CliRunner().invoke(app, [verb[0], str(exported), *verb[1:], *options])
    assert done.exit_code == 0, done.output
    assert "OnnxModel" in done.output


def test_without_onnx_the_extra_is_named(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    with pytest.raises(CheckpointError, match=r"pip install 'gascompile\[onnx\]'"):
        open_checkpoint(exported)


def test_weights_that_overlap_are_refused(exported: Path, tmp_path: Path) -> None:
    proto = onnx.load(exported, load_external_data=False)
    weights = [t for t in proto.graph.initializer if t.dims == [256, 256]]
    for number, tensor in enumerate(weights[:2]):
        for entry in tensor.external_data:
            if entry.key == "offset":
                entry.value = str(4096 * number)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    (tmp_path / "m.onnx.data").write_bytes((exported.parent / "m.onnx.data").read_bytes())
    with pytest.raises(CheckpointError, match="overlap"):
        open_checkpoint(tmp_path / "m.onnx")


def test_comparisons_of_sizes_are_booleans(tmp_path: Path) -> None:
    nodes = [
        onnx.helper.make_node("Shape", ["x"], ["s"]),
        onnx.helper.make_node("Equal", ["s", "c"], ["e"]),
        onnx.helper.make_node("Cast", ["e"], ["n"], to=7),
    ]
    outputs = [value("e", [3], 9), value("n", [3], 7)]
    file = build(nodes, [value("x", [2, 3, 4])], outputs, ints(c=[2, 0, 4]), tmp_path / "e.onnx")
    for found, expected in zip(onnx_module(file)(X), by_runtime(file, {"x": X}), strict=True):
        torch.testing.assert_close(found, expected)
