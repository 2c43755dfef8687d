"""Placements of llama.cpp as plans: who holds which layer, times by hand, and the way through the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gascompile.cli import app
from gascompile.core import serial
from gascompile.core.budget import Budget
from gascompile.core.errors import DeviceMapError, InfeasiblePlanError
from gascompile.core.plan import Plan
from gascompile.core.sizes import reserve_bytes
from gascompile.core.steps import Offload, Prefetch, Reload
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.integrations.llama_cpp import LlamaCppPlacement, llama_cpp_plan
from gascompile.passes.plan.make_plan import make_plan
from tests.passes.planning import cpu_machine
from tests.passes.planning import workload as workload_of
from tests.passes.test_sites import SIZE, machine

ROOM, PAGE = reserve_bytes(SIZE), 4096


def language_model(num_layers: int, *, gpu_s: float = 1.0, cpu_s: float = 3.0) -> Workload:
    """Return two linear ops per layer between a table of words and an output."""
    names = ["model.embed_tokens.weight"]
    for i in range(num_layers):
        names += [f"model.layers.{i}.{leaf}.weight" for leaf in ("self_attn.q_proj", "mlp.up_proj")]
    names.append("lm_head.weight")
    return of_weights("lm", names, gpu_s=gpu_s, cpu_s=cpu_s)


def of_weights(
    name: str, weights: Sequence[str], *, gpu_s: float = 1.0, cpu_s: float = 3.0
) -> Workload:
    """Return one op after the other, each of which reads a weight of its own."""
    kinds = [TensorKind.INPUT, *[TensorKind.ACTIVATION] * (len(weights) - 1), TensorKind.OUTPUT]
    tensors = [TensorSpec(name=n, size_bytes=SIZE, kind=TensorKind.WEIGHT) for n in weights]
    tensors += [TensorSpec(name=f"x{i}", size_bytes=4, kind=kind) for i, kind in enumerate(kinds)]
    ops = tuple(
        OpSpec(
            name=f"op{i}",
            time_s={"gpu": gpu_s, "cpu": cpu_s},
            reads=(f"x{i}", weight),
            writes=(f"x{i + 1}",),
        )
        for i, weight in enumerate(weights)
    )
    return Workload(name=name, repeats=True, tensors=tuple(tensors), ops=ops)


def on_gpu(plan: Plan) -> set[str]:
    return {name for name, tensor in plan.tensors.items() if tensor.home == "gpu"}


@pytest.mark.parametrize(
    ("ngl", "layers", "head"), [(0, [], 0), (1, [], 1), (2, [3], 1), (5, [0, 1, 2, 3], 1), (99, [0, 1, 2, 3], 1)]
)  # fmt: skip
def test_the_last_layers_are_on_the_gpu_and_ops_run_beside_their_weights(
    ngl: int, layers: list[int], head: int
) -> None:
    workload = language_model(4)
    plan = llama_cpp_plan(LlamaCppPlacement.of(ngl), workload, machine(0.5))
    assert plan.strategy == "llama_cpp"
    held = {name for name in on_gpu(plan) if "weight" in name}
    wanted = {n for n in plan.tensors if any(f"layers.{i}." in n for i in layers)}
    assert held == wanted | ({"lm_head.weight"} if head else set())
    for op, planned in zip(plan.workload.ops, plan.ops, strict=True):
        (weight,) = (name for name in op.reads if "weight" in name)
        assert (planned.site == "gpu") == (weight in held), weight
    # No weight moves; what the sites tell each other takes next to nothing.
    assert not any(isinstance(step, Prefetch) for step in plan.steps)
    assert any(isinstance(step, (Offload, Reload)) for step in plan.steps)
    assert plan.certificate.predicted_s == pytest.approx(3.0 * 10 - 2.0 * len(held), rel=1e-3)
    assert plan.peak_bytes["gpu"] >= len(held) * ROOM


def test_patterns_say_where_single_tensors_lie() -> None:
    workload = language_model(4)
    # By the names of GGUF files and by the model's own; the first pattern that is found counts.
    placement = LlamaCppPlacement.of(
        99, [r"blk\.[01]\.ffn_up=CPU", r"layers\.2\.self=CPU,layers\.2=CUDA0,token_embd=CUDA0"]
    )
    plan = llama_cpp_plan(placement, workload, machine(0.5))
    weights = {tensor.name for tensor in workload.tensors if tensor.kind == TensorKind.WEIGHT}
    assert weights - on_gpu(plan) == {
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.2.self_attn.q_proj.weight",
    }


@settings(max_examples=30, deadline=None)
@given(num_layers=st.integers(1, 6), ngl=st.integers(0, 8), cpu_s=st.floats(0.1, 5))
def test_a_chain_takes_the_sum_of_its_ops(num_layers: int, ngl: int, cpu_s: float) -> None:
    workload = language_model(num_layers, cpu_s=cpu_s)
    plan = llama_cpp_plan(LlamaCppPlacement.of(ngl), workload, machine(0.5))
    sites = {planned.name: planned.site for planned in plan.ops}
    where = (op.time_s[sites[op.name]] for op in plan.workload.ops)
    assert plan.certificate.predicted_s == pytest.approx(sum(where), rel=1e-3)
    assert plan.certificate.limit_s <= plan.certificate.predicted_s * (1 + 1e-9)


@settings(max_examples=12, deadline=None)
@given(ngl=st.integers(0, 8), cpu_s=st.floats(1, 4), link_s=st.floats(0.5, 8))
def test_a_plan_of_our_own_is_never_slower(ngl: int, cpu_s: float, link_s: float) -> None:
    workload, two = language_model(5, cpu_s=cpu_s), machine(link_s)
    theirs = llama_cpp_plan(LlamaCppPlacement.of(ngl), workload, two)
    budget = Budget(gpu=theirs.peak_bytes["gpu"] + PAGE)
    ours = make_plan(workload, two, budget, fingerprint={}, time_limit_s=1)
    assert ours.certificate.predicted_s <= theirs.certificate.predicted_s * 1.001


def test_what_cannot_be_is_refused() -> None:
    workload, two = language_model(2), machine(0.5)
    for pattern in ("ffn", "=CPU", "(=CPU"):
        with pytest.raises(DeviceMapError, match="-ot"):
            LlamaCppPlacement.of(3, [pattern])
    with pytest.raises(DeviceMapError, match="-ngl"):
        LlamaCppPlacement.of(-1)
    with pytest.raises(DeviceMapError, match="CUDA1"):
        llama_cpp_plan(LlamaCppPlacement.of(3, ["ffn=CUDA1"]), workload, two)
    with pytest.raises(DeviceMapError, match="no weight's name"):
        llama_cpp_plan(LlamaCppPlacement.of(3, ["exps=CPU"]), workload, two)
    with pytest.raises(InfeasiblePlanError):
        llama_cpp_plan(LlamaCppPlacement.of(3), workload, two, Budget(gpu=2 * ROOM))
    with pytest.raises(DeviceMapError, match="how fast its host computes"):
        llama_cpp_plan(LlamaCppPlacement.of(3), workload_of("ab"), cpu_machine())
    with pytest.raises(DeviceMapError, match="no room"):
        llama_cpp_plan(LlamaCppPlacement.of(1), workload, two, Budget(gpu=8 * ROOM, cpu=5 * SIZE))


def test_the_command_line_takes_the_flags(tmp_path: Path) -> None:
    source, target = tmp_path / "lm.workload.json", tmp_path / "machine.json"
    source.write_text(serial.dumps(language_model(2)))
    target.write_text(serial.dumps(machine(0.5)))
    base = ["plan", str(source), "-m", str(target), "--json"]
    found = CliRunner().invoke(app, [*base, "--ngl", "3", "--ot", "ffn_up=CPU"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["strategy"] == "llama_cpp"
    for wrong in ("--ot a=CPU", "--ngl 3 --device-map x.json", "--ngl 3 --strategy ilp"):
        assert CliRunner().invoke(app, [*base, *wrong.split()]).exit_code == 2
