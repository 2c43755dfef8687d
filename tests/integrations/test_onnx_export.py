"""Models written as ONNX: equal to eager in onnxruntime, weights in place or copied, files whole, plans noted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import gascompile
from gascompile.api.plan import plan_with_program
from gascompile.cli import app
from gascompile.core.errors import (
    CheckpointError,
    StorageError,
    UnsupportedOpError,
)
from gascompile.core.plan import Plan
from gascompile.integrations.onnx.annotate_plan import annotate_plan
from gascompile.integrations.onnx.export import OnnxExport, write_plan
from gascompile.integrations.onnx.translate import onnx_module
from tests.zoo import assert_same, eager, make

onnx = pytest.importorskip("onnx")
onnx_ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")


class Net(nn.Module):
    """Layers of which one is tied, a constant, a weight that is read transposed, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.first = nn.Linear(64, 256)
        self.second = nn.Linear(256, 64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.full((64,), 0.5), persistent=False)
        self.mix = nn.Parameter(torch.randn(64, 64).t())

    def forward(self, ids: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(ids) * self.scale + shift
        x = self.second(nn.functional.silu(self.first(x))) @ self.mix
        return {"logits": self.head(x), "mean": x.mean(-1)}


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


INPUTS = {"ids": torch.arange(12).reshape(2, 6), "shift": torch.linspace(-1, 1, 64)}


def by_runtime(file: Path, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    onnx.checker.check_model(str(file), full_check=True)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    given = {n: v.numpy() for n, v in inputs.items() if isinstance(v, torch.Tensor)}
    return [torch.from_numpy(value) for value in session.run(None, given)]


def assert_close(found: list[torch.Tensor], wanted: list[Any]) -> None:
    tensors = [value for value in wanted if isinstance(value, torch.Tensor)]
    assert len(found) == len(tensors)
    for value, expected in zip(found, tensors, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_module_in_memory_runs_in_onnxruntime(tmp_path: Path) -> None:
    model = net()
    found = gascompile.export(model, tmp_path / "m.onnx", INPUTS, cache_dir=tmp_path / "cache")
    assert found.inputs == ("ids", "shift") and found.outputs == ("logits", "mean")
    assert_close(by_runtime(found.written.file, INPUTS), eager(model, INPUTS))
    held = onnx.load(found.written.file, load_external_data=False).graph.initializer
    # The tied weight stands there once.
    large = {t.name: tuple(t.dims) for t in held if t.data_location == onnx.TensorProto.EXTERNAL}
    assert large == {
        "table.weight": (50, 64), "first.weight": (256, 64), "first.bias": (256,), "second.weight": (64, 256),
        "second.bias": (64,), "mix": (64, 64),
    }  # fmt: skip
    assert found.written.copied_bytes == 4 * (50 * 64 + 2 * 256 * 64 + 256 + 64 + 64 * 64)
    assert files(tmp_path) == {"m.onnx", "m.onnx.data", "cache"}
    umask = os.umask(0)
    os.umask(umask)
    assert {(tmp_path / n).stat().st_mode & 0o777 for n in ("m.onnx", "m.onnx.data")} == {
        0o666 & ~umask
    }


def test_weights_beside_the_file_are_used_in_place(tmp_path: Path) -> None:
    model = net()
    state = {n: t.contiguous() for n, t in model.state_dict().items() if n != "head.weight"}
    save_file(state, tmp_path / "w.safetensors")
    with torch.device("meta"):
        empty = Net().eval()
    empty.head.weight = empty.table.weight
    empty.scale = torch.full((64,), 0.5)
    found = gascompile.export(empty, tmp_path / "m.onnx", INPUTS, checkpoint=tmp_path)
    # The one that lies transposed in the model is the only one to be laid out anew.
    assert found.written.copied_bytes == 64 * 64 * 4
    assert found.written.in_place_bytes == sum(t.nbytes for t in state.values()) - 64 * 64 * 4
    assert_close(by_runtime(found.written.file, INPUTS), eager(model, INPUTS))

    other = tmp_path / "other"
    other.mkdir()
    found = gascompile.export(empty, other / "m.onnx", INPUTS, checkpoint=tmp_path)
    assert found.written.in_place_bytes == 0
    assert_close(by_runtime(found.written.file, INPUTS), eager(model, INPUTS))

    linked = tmp_path / "linked"
    linked.mkdir()
    os.link(tmp_path / "w.safetensors", linked / "w.safetensors")
    found = gascompile.export(empty, linked / "m.onnx", INPUTS, checkpoint=linked)
    assert found.written.in_place_bytes == 0, "onnx takes no file of several names"
    assert_close(by_runtime(found.written.file, INPUTS), eager(model, INPUTS))


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    model = nn.Linear(32, 32).eval()
    inputs = (torch.zeros(2, 32),)
    (tmp_path / "m.onnx.data").write_text("mine")
    with pytest.raises(StorageError, match="is there already"):
        gascompile.export(model, tmp_path / "m.onnx", inputs)
    assert files(tmp_path) == {"m.onnx.data"}
    gascompile.export(model, tmp_path / "m.onnx", inputs, overwrite=True)
    assert (tmp_path / "m.onnx.data").read_text() == "mine"
    assert files(tmp_path) == {"m.onnx.data", "m.onnx", "m.onnx.2.data"}
    # Its own data goes with it; but not where another file reads that, too.
    gascompile.export(model, tmp_path / "m.onnx", inputs, overwrite=True)
    assert files(tmp_path) == {"m.onnx.data", "m.onnx", "m.onnx.3.data"}
    shutil.copy(tmp_path / "m.onnx", tmp_path / "copy.onnx")
    gascompile.export(model, tmp_path / "m.onnx", inputs, overwrite=True)
    assert (tmp_path / "m.onnx.3.data").exists()
    by_runtime(tmp_path / "copy.onnx", {"input": inputs[0]})


def test_a_full_disk_is_found_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(64, 64).eval()
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(StorageError, match="free space"):
        gascompile.export(model, tmp_path / "m.onnx", (torch.zeros(2, 64),))
    assert not {name for name in files(tmp_path) if name.startswith((".", "m"))}


_KILLED = """
import os, signal, sys, torch
import gascompile
from gascompile.integrations.onnx import write
replace, calls = os.replace, []
def killed(*names):
    calls.append(names)
    if len(calls) == 2:  # the data is there under its name, the model is not
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*names)
write.os.replace = killed
torch.manual_seed(1)
gascompile.export(torch.nn.Linear(64, 64).eval(), sys.argv[1], (torch.zeros(2, 64),), overwrite=True)
"""


def test_a_kill_leaves_the_file_of_before(root: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64).eval()
    x = torch.randn(2, 64)
    gascompile.export(model, tmp_path / "m.onnx", (torch.zeros(2, 64),))
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path / "m.onnx")], check=False, cwd=root
    )
    assert done.returncode == -signal.SIGKILL
    assert_close(by_runtime(tmp_path / "m.onnx", {"input": x}), [model(x)])
    gascompile.export(model, tmp_path / "m.onnx", (torch.zeros(2, 64),), overwrite=True)
    assert not [name for name in files(tmp_path) if name.endswith(".partial")]


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.calls


class Writer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)


class Inverse(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lu_factor(x)[0]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Counter(), "changes 'calls' at each call"),
        (Writer(), "writes to its input 'x'"),
        (Inverse(), "cannot express Inverse: .*linalg_lu_factor"),
    ],
)
def test_what_onnx_cannot_say_is_refused(model: nn.Module, says: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOpError, match=says):
        gascompile.export(model.eval(), tmp_path / "m.onnx", (torch.rand(3, 3),))
    assert not files(tmp_path)


def test_weights_without_values_are_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(8, 8).eval()
    with pytest.raises(CheckpointError, match="weight"):
        gascompile.export(model, tmp_path / "m.onnx", (torch.zeros(1, 8),))
    with pytest.raises(ValueError, match=r"end in \.onnx"):
        gascompile.export(model, tmp_path / "m.bin", (torch.zeros(1, 8),))


def test_without_onnxscript_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(CheckpointError, match=r"pip install 'gascompile\[onnx\]'"):
        gascompile.export(nn.Linear(2, 2), tmp_path / "m.onnx", (torch.zeros(1, 2),))


def homes(file: Path) -> dict[str, str]:
    values = onnx.load(file, load_external_data=False).graph.value_info
    said = {v.name: {e.key: e.value for e in v.metadata_props} for v in values}
    return {name: m["gascompile.home"] for name, m in said.items() if "gascompile.home" in m}


def devices(file: Path) -> dict[str, tuple[str, ...]]:
    """Return the devices of what each node returns, by the op that it is noted to be."""
    model = onnx.load(file, load_external_data=False)
    (configuration,) = model.configuration
    found: dict[str, set[str]] = {}
    for node in model.graph.node:
        for placed in node.device_configurations:
            assert placed.configuration_id == configuration.name
            (op,) = (e.value for e in node.metadata_props if e.key == "gascompile.op")
            specs = placed.sharding_spec
            assert {spec.tensor_name for spec in specs} == set(filter(None, node.output))
            found.setdefault(op, set()).update(
                configuration.device[i] for spec in specs for i in spec.device
            )
    return {op: tuple(names) for op, names in found.items()}


def test_a_plan_is_noted_as_it_is(tmp_path: Path) -> None:
    model = net()
    planned = plan_with_program(
        model, "180KiB", "cpu-nvme", INPUTS, cache_dir=tmp_path, time_limit_s=2.0
    )
    plan = planned.plan
    written, annotated = write_plan(planned, tmp_path / "p.onnx")
    assert written.ir_version >= 11
    assert not annotated.unplaced and annotated.num_placed == annotated.num_nodes
    assert_close(by_runtime(tmp_path / "p.onnx", INPUTS), eager(model, INPUTS))
    weights = {n: t.home for n, t in plan.tensors.items() if n in homes(tmp_path / "p.onnx")}
    assert homes(tmp_path / "p.onnx") == weights and set(weights.values()) == {"cpu", "nvme"}
    assert {"first.weight", "second.weight", "table.weight", "mix"} <= weights.keys()
    sites = {op.name: op.site for op in plan.ops}
    placed = devices(tmp_path / "p.onnx")
    assert placed == {op: (sites[op],) for op in placed}
    assert set(sites) == set(placed) | set(annotated.ops_without_node)
    noted = {e.key: e.value for e in onnx.load(tmp_path / "p.onnx").metadata_props}
    assert json.loads(noted["gascompile.fingerprint"]) == dict(plan.fingerprint)
    assert (
        json.loads(noted["gascompile.certificate"])["predicted_s"] == plan.certificate.predicted_s
    )


def test_nodes_go_where_their_ops_go(tmp_path: Path) -> None:
    """A plan over two processors, made by hand: each node is on its op's device, or on none."""
    model = net()
    planned = plan_with_program(model, None, "cpu-nvme", INPUTS, cache_dir=tmp_path)
    names = [op.name for op in planned.plan.ops]
    elsewhere = set(names[len(names) // 2 :: 2])
    ops = tuple(replace(o, site="nvme") if o.name in elsewhere else o for o in planned.plan.ops)
    split = replace(planned, plan=replace(planned.plan, ops=ops))
    _, annotated = write_plan(split, tmp_path / "p.onnx")
    assert annotated.devices == ("cpu", "nvme")
    placed = devices(tmp_path / "p.onnx")
    assert placed == {op: ("nvme" if op in elsewhere else "cpu",) for op in placed}
    assert_close(by_runtime(tmp_path / "p.onnx", INPUTS), eager(model, INPUTS))


def _two_ops() -> tuple[Any, Plan, list[Any]]:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()
    planned = plan_with_program(model, None, "cpu-nvme", (torch.zeros(2, 32),))
    from gascompile.integrations.onnx.from_program import onnx_graph

    graph = onnx_graph(planned.captured.program, {})
    return graph, planned.plan, list(graph.graph)


def test_what_is_not_proven_gets_no_device() -> None:
    graph, plan, nodes = _two_ops()
    first, last = (op.name for op in plan.ops if "linear" in op.name)
    weights = {name: name for name in graph.graph.initializers}
    # The second layer taken for the first one: its weight gives it away. An op that the plan has not: the same.
    wrong = dict.fromkeys(nodes, (first,)) | {nodes[1]: ("nobody",)}
    found = annotate_plan(graph, plan, ops=wrong, weights=weights)
    assert found.num_placed == 1 and found.unplaced == {"Relu": 1, "Gemm": 1}
    assert last in found.ops_without_node
    # Another plan takes the place of the first one.
    right = {n: (op.name,) for n, op in zip(nodes, plan.ops, strict=True)}
    found = annotate_plan(graph, plan, ops=right, weights=weights)
    assert found.num_placed == 3 and len(graph.device_configurations) == 1
    assert all(len(node.device_configurations) == 1 for node in nodes)


@pytest.mark.parametrize("where", ["same", "other"])
def test_an_onnx_file_is_written_again_with_a_plan(where: str, tmp_path: Path) -> None:
    model = net()
    made = gascompile.export(model, tmp_path / "m.onnx", INPUTS)
    folder = tmp_path if where == "same" else tmp_path / "other"
    folder.mkdir(exist_ok=True)
    options = [
        "--budget",
        "300KiB",
        "--machine",
        "cpu-nvme",
        "--cache-dir",
        str(tmp_path),
        "--json",
    ]
    command = ["plan", str(made.written.file), "--onnx", str(folder / "p.onnx"), *options]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["onnx"]["copied_bytes"] == 0) == (where == "same")
    assert_close(by_runtime(folder / "p.onnx", INPUTS), eager(model, INPUTS))
    tensors = said["plan"]["tensors"]
    found = homes(folder / "p.onnx")
    assert found and found == {name: tensors[name]["home"] for name in found}
    placed, sites = devices(folder / "p.onnx"), {o["name"]: o["site"] for o in said["plan"]["ops"]}
    assert {name for names in placed for name in names.split(" ")} <= sites.keys()
    both = ((tmp_path, "m.onnx"), (folder, "p.onnx"))
    before, after = (onnx.load(f / n, load_external_data=False) for f, n in both)
    assert [n.op_type for n in before.graph.node] == [n.op_type for n in after.graph.node]


def test_the_command_line_exports_a_directory(tmp_path: Path) -> None:
    model, inputs = make("llama")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    file = tmp_path / "m.onnx"
    options = ["-o", str(file), "--tokens", "8", "--dynamic", "input_ids.1=tokens:32", "--json"]
    done = CliRunner().invoke(app, ["export", str(tmp_path), *options])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["copied_bytes"] == 0 and said["in_place_bytes"] > 300_000
    longer = {"input_ids": torch.cat([inputs["input_ids"][:1]] * 3, 1)}
    assert_close(by_runtime(file, longer), eager(model, longer))
    again = CliRunner().invoke(app, ["export", str(tmp_path), *options])
    assert (
        again.exit_code == 1 and "is there already" in json.loads(again.stdout)["error"]["message"]
    )


@pytest.mark.parametrize(
    "options",
    [
        ["-o", "m.bin"],
        ["-o", "m.onnx", "--dynamic", "x"],
        ["-o", "m.onnx", "--dynamic", "ids.9=n:8"],
        [],
    ],
)
def test_wrong_usage(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["export", "tests.integrations.test_onnx_export:source", *options]
    assert CliRunner().invoke(app, command).exit_code == 2


def source() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return net(), INPUTS


def test_a_finished_plan_has_no_graph(tmp_path: Path) -> None:
    planned = plan_with_program(net(), None, "cpu-nvme", INPUTS, cache_dir=tmp_path)
    planned.plan.save(tmp_path / "p.json")
    command = ["plan", str(tmp_path / "p.json"), "--onnx", str(tmp_path / "m.onnx")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2 and not (tmp_path / "m.onnx").exists()


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name",
    ["llama", "convnet", slow("bert"), slow("gpt2"), slow("vit"), slow("clip"), slow("whisper"), slow("t5"),
     slow("gemma3"), slow("mamba2"), slow("hubert"), slow("tied")],
)  # fmt: skip
def test_families_go_there_and_back(name: str, tmp_path: Path) -> None:
    model, inputs = make(name)
    wanted = eager(model, inputs)
    found: OnnxExport = gascompile.export(model, tmp_path / "m.onnx", inputs, cache_dir=tmp_path)
    assert_close(by_runtime(tmp_path / "m.onnx", inputs), wanted)
    tensors = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    assert found.inputs == tuple(tensors)
    compiled = gascompile.compile(
        tmp_path / "m.onnx", machine="emulated", cache_dir=tmp_path / "c", fuse="off"
    )
    outputs = compiled(**tensors)
    compiled.close()
    assert_same(outputs, [value for value in wanted if isinstance(value, torch.Tensor)])


@pytest.mark.parametrize("name", ["mixtral", slow("deepseek_v3")])
def test_what_the_exporter_cannot_write_is_named(name: str, tmp_path: Path) -> None:
    model, inputs = make(name)
    with pytest.raises(UnsupportedOpError, match="grouped_mm"):
        gascompile.export(model, tmp_path / "m.onnx", inputs, cache_dir=tmp_path)


def test_the_plan_of_the_file_is_that_of_the_model(tmp_path: Path) -> None:
    """Where weights stream, and ops take longer than their launch, both are within a hundredth."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=1,
        num_attention_heads=8,
        vocab_size=500,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    inputs = {"input_ids": torch.arange(128)[None]}
    gascompile.export(model, tmp_path / "m.onnx", inputs, cache_dir=tmp_path)
    predicted = [
        gascompile.plan(m, "9MiB", "cpu-nvme", inputs, cache_dir=tmp_path).certificate.predicted_s
        for m in (model, onnx_module(tmp_path / "m.onnx"))
    ]
    assert predicted[1] == pytest.approx(predicted[0], rel=0.01)
