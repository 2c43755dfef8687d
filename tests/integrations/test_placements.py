"""Placements of other tools: who lies where, times by hand, what is not followed, and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gascompile.cli import app
from gascompile.core import serial
from gascompile.core.budget import Budget
from gascompile.core.errors import DeviceMapError, FormatError
from gascompile.core.machine import Machine
from gascompile.core.sizes import reserve_bytes
from gascompile.core.workload import Workload
from gascompile.integrations.device_map import Mapped
from gascompile.integrations.placements import read_placement, taken_by
from tests.integrations.test_llama_cpp import of_weights
from tests.passes.test_sites import SIZE, machine

ROOM = reserve_bytes(SIZE)
LINK_S = 0.5
"""Seconds for one weight to come from the host."""


def mixture(num_layers: int = 3) -> Workload:
    """Return per layer an op of attention, one of fused experts and one of a shared expert, of one second each."""
    leaves = ("self_attn.q_proj.weight", "mlp.experts.up_proj", "mlp.shared_experts.up_proj.weight")
    names = [f"model.layers.{i}.{leaf}" for i in range(num_layers) for leaf in leaves]
    return of_weights("moe", names)


def job(budget: int | None = None, *, on: Machine | None = None) -> Mapped:
    return Mapped(
        workload=mixture(),
        machine=on or machine(LINK_S),
        budget=Budget() if budget is None else Budget(gpu=budget),
        modules=frozenset(),
    )


def hosted(text: str) -> set[str]:
    tiers = read_placement(text).tiers(job())
    return {name.removeprefix("model.layers.") for name, place in tiers.items() if place == "cpu"}


def written(path: Path, data: Any) -> str:
    path.write_text(json.dumps(data))
    return str(path)


def zero(path: Path, *, stage: int = 3, device: Any = "cpu", **more: Any) -> str:
    """Return the path of a configuration of DeepSpeed."""
    offload = {"device": device, "pin_memory": True}
    return written(
        path / "ds.json", {"zero_optimization": {"stage": stage, "offload_param": offload, **more}}
    )


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("-ngl 99", set()),
        ("-ngl all --n-cpu-moe 0", set()),
        ("-ngl 99 --n-cpu-moe 2", {"0.mlp.experts.up_proj", "1.mlp.experts.up_proj"}),
        ("-ngl 99 -ncmoe 1", {"0.mlp.experts.up_proj"}),
        ("-ngl=99 --cpu-moe", {f"{i}.mlp.experts.up_proj" for i in range(3)}),
        ("--gpu-layers 99 -ot 'layers\\.1\\.self=CPU'", {"1.self_attn.q_proj.weight"}),
        (
            "-ngl 3 -ncmoe 2",
            {f"0.{x}" for x in ("self_attn.q_proj.weight", "mlp.experts.up_proj", "mlp.shared_experts.up_proj.weight")}
            | {"1.mlp.experts.up_proj"},
        ),
        # The first that is found counts, in the order of the flags.
        ("-ngl 99 -ot 'layers\\.0\\.mlp\\.experts=CUDA0' -ncmoe 2", {"1.mlp.experts.up_proj"}),
    ],
)  # fmt: skip
def test_flags_of_llama_cpp(flags: str, wanted: set[str]) -> None:
    assert hosted(flags) == wanted


def test_what_no_plan_follows_is_named(tmp_path: Path) -> None:
    found = read_placement("-ngl 3 -fa on --threads 8 -ts 3,1 --no-mmap")
    assert set(found.not_modelled) == {"-fa on", "--threads 8", "-ts 3,1", "--no-mmap"}
    path = zero(
        tmp_path,
        offload_optimizer={"device": "nvme", "nvme_path": "/data"},
        stage3_prefetch_bucket_size=1e7,
        stage3_param_persistence_threshold=0,
        anything={"of": "later"},
    )
    data = json.loads(Path(path).read_text()) | {"train_batch_size": 8, "aio": {"queue_depth": 8}}
    found = read_placement(written(tmp_path / "more.json", data))
    assert set(found.not_modelled) == {
        "train_batch_size",
        "aio",
        *(
            f"zero_optimization.{name}"
            for name in ("offload_optimizer", "stage3_prefetch_bucket_size", "anything", "offload_param.pin_memory")
        ),
    }  # fmt: skip
    assert found.loads_ahead


def test_deepspeed_offloads_what_is_large_in_stage_three(tmp_path: Path) -> None:
    workload = mixture()
    elements = SIZE // 4
    assert len(hosted(zero(tmp_path))) == (9 if elements > 100_000 else 0)
    everything = zero(tmp_path, stage3_param_persistence_threshold=elements - 1)
    assert len(hosted(everything)) == len([t for t in workload.tensors if t.kind == "weight"])
    assert not hosted(zero(tmp_path, stage3_param_persistence_threshold=elements))
    below = read_placement(zero(tmp_path, stage=2, stage3_param_persistence_threshold=0))
    assert "stage 3 alone" in below.not_modelled["zero_optimization.offload_param.device"]
    assert set(below.tiers(job()).values()) == {"gpu"}
    half = json.loads(Path(zero(tmp_path, stage3_param_persistence_threshold=elements)).read_text())
    # Of two bytes, a weight of as many bytes has twice the elements.
    assert len(hosted(written(tmp_path / "half.json", half | {"bf16": {"enabled": True}}))) == 9


def test_times_and_memory_are_those_by_hand(tmp_path: Path) -> None:
    everywhere = zero(tmp_path, stage3_param_persistence_threshold=0)
    found = taken_by(read_placement(everywhere), job())
    # Each of nine weights comes before its op, or all are hidden behind nine seconds of ops.
    assert found.plan.certificate.predicted_s == pytest.approx(9 * (1 + LINK_S), rel=1e-3)
    assert found.least_s == pytest.approx(9.0, rel=1e-3)
    slow = taken_by(read_placement(everywhere), job(on=machine(4.0)))
    assert slow.least_s == pytest.approx(9 * 4.0, rel=1e-3)  # the link is the longer
    mapped = taken_by(read_placement(written(tmp_path / "map.json", {"": "cpu"})), job())
    assert (
        mapped.least_s == mapped.plan.certificate.predicted_s == found.plan.certificate.predicted_s
    )
    experts = taken_by(read_placement("-ngl 99 --cpu-moe"), job())
    assert experts.plan.certificate.predicted_s == pytest.approx(6 * 1.0 + 3 * 3.0, rel=1e-3)
    assert 6 * ROOM <= experts.required_bytes < 7 * ROOM


def test_what_is_over_the_budget_is_told_with_its_time() -> None:
    within = taken_by(read_placement("-ngl 99"), job())
    assert within.over_bytes == 0
    tight = taken_by(read_placement("-ngl 99"), job(2 * ROOM))
    assert tight.over_bytes == tight.required_bytes - 2 * ROOM > 6 * ROOM
    assert tight.plan.certificate.predicted_s == pytest.approx(9.0, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-ot a=CPU", "add -ngl"),
        ("-ngl auto", "-ngl takes a number"),
        ("-ngl 5 -ncmoe -1", "-ncmoe takes a number"),
        ("-ngl 5 'oh", "cannot be read"),
        ("-ngl 5 6 7", "'6' is no flag|'7' is no flag"),
        ("-ngl 5 -ot ffn", "PATTERN=DEVICE"),
    ],
)
def test_flags_that_cannot_be_are_refused(text: str, message: str) -> None:
    with pytest.raises(DeviceMapError, match=message):
        read_placement(text)


def test_files_that_are_neither_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    for data in (
        {"a": {"b": 1}},
        [1],
        {"zero_optimization": 3},
        {"zero_optimization": {"stage": 4}},
    ):
        with pytest.raises(FormatError, match=r"given\.json"):
            read_placement(written(path, data))
    for device, shown in (("tape", "'tape'"), (["cpu"], r"\['cpu'\]")):
        with pytest.raises(DeviceMapError, match=shown):
            read_placement(zero(tmp_path, device=device))
    with pytest.raises(FormatError, match="no number of elements"):
        read_placement(zero(tmp_path, stage3_param_persistence_threshold=float("nan")))
    # Whether weights are of two or of four bytes is left open, and with it which of them stay.
    data = json.loads(Path(zero(tmp_path)).read_text())
    with pytest.raises(FormatError, match=r"bf16\.enabled is 'auto'.*true or"):
        read_placement(written(path, data | {"bf16": {"enabled": "auto"}}))
    assert not read_placement(
        written(path, data | {"bf16": {"enabled": True}})
    ).not_modelled.keys() & {"bf16"}
    with pytest.raises(DeviceMapError, match="no place 'nvme'"):
        taken_by(read_placement(zero(tmp_path, device="nvme")), job(on=without_drive()))


def without_drive() -> Machine:
    two = machine(LINK_S)
    return replace(
        two,
        places=tuple(p for p in two.places if p.name != "nvme"),
        links=tuple(x for x in two.links if "nvme" not in x.name),
    )


def test_the_command_line_says_both(tmp_path: Path) -> None:
    source, target = tmp_path / "moe.workload.json", tmp_path / "machine.json"
    source.write_text(serial.dumps(mixture()))
    target.write_text(serial.dumps(machine(LINK_S)))
    base = ["plan", str(source), "-m", str(target), "--budget", str(5 * ROOM)]
    flags = "-ngl 99 -ncmoe 2 -fa on"
    found = CliRunner().invoke(app, [*base, f"--compare={flags}", "--json"])
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    theirs, ours = data["theirs"], data["ours"]
    assert theirs["origin"] == "llama.cpp"
    assert theirs["not_modelled"] == {"-fa on": "no plan follows this flag"}
    assert theirs["over_bytes"] == theirs["required_bytes"] - 5 * ROOM > 0
    assert theirs["seconds"] == pytest.approx(7 + 2 * 3, rel=1e-3)
    assert ours["required_bytes"] <= data["budget_bytes"] == 5 * ROOM
    shown = CliRunner().invoke(app, [*base, f"--compare={flags}"]).output
    assert "over the budget by" in shown
    assert "not modelled: -fa on" in shown
    ranged = CliRunner().invoke(
        app, [*base, "--compare", zero(tmp_path, stage3_param_persistence_threshold=0)]
    )
    assert "9 s to 13.5 s, " in ranged.output
    for wrong in (["--ngl", "3"], ["--ranks", "2"]):
        assert CliRunner().invoke(app, [*base, *wrong, f"--compare={flags}"]).exit_code == 2
