"""Plans in ONNX files: devices and homes are those of the plan, and what is not proven has none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gascompile
from gascompile.api.plan import plan_with_program
from gascompile.cli import app
from gascompile.core.plan import Plan
from gascompile.integrations.onnx.annotate_plan import annotate_plan
from gascompile.integrations.onnx.export import write_plan
from gascompile.integrations.onnx.from_program import onnx_graph
from gascompile.integrations.onnx.translate import onnx_module
from tests.integrations.onnx_models import INPUTS, assert_close, by_runtime, net, onnx
from tests.zoo import eager


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


def test_a_finished_plan_has_no_graph(tmp_path: Path) -> None:
    planned = plan_with_program(net(), None, "cpu-nvme", INPUTS, cache_dir=tmp_path)
    planned.plan.save(tmp_path / "p.json")
    for command in (["plan", "--onnx"], ["export", "-o"]):
        verb, option = command
        told = [verb, str(tmp_path / "p.json"), option, str(tmp_path / "m.onnx")]
        assert CliRunner().invoke(app, told).exit_code == 2
        assert not (tmp_path / "m.onnx").exists()


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


@pytest.mark.parametrize("is_inline", [False, True], ids=["data beside", "one file"])
def test_a_file_written_over_itself_keeps_its_weights(tmp_path: Path, is_inline: bool) -> None:
    model, file = net(), tmp_path / "m.onnx"
    gascompile.export(model, file, INPUTS, cache_dir=tmp_path / "cache")
    if is_inline:
        whole = onnx.load(file)
        (tmp_path / "m.onnx.data").unlink()
        onnx.save(whole, file)
    for _ in range(2):
        planned = plan_with_program(
            str(file), "1MiB", "cpu-nvme", cache_dir=tmp_path / "cache", time_limit_s=2.0
        )
        write_plan(planned, file, overwrite=True)
        assert_close(by_runtime(file, INPUTS), eager(model, INPUTS))
