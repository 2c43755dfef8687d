"""Plans over hosts: files, chains, digests, and training steps over equal ranks."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gascompile.api.plan_hosts import plan_hosts
from gascompile.core import serial
from gascompile.core.checks.hosts import check_hosts, host_presets, named_hosts
from gascompile.core.checks.machine_files import preset
from gascompile.core.errors import (
    FormatError,
    InfeasiblePlanError,
    StorageError,
    UnsupportedOpError,
)
from gascompile.core.hosts import Hosts, Interconnect, LadderPoint, equal_ranks
from gascompile.core.hosts_plan import HostsPlan
from gascompile.core.machine import Place, PlaceKind
from gascompile.core.workload import Workload
from gascompile.passes.parallel.chain import chain
from tests.passes.stacks import MB, stack


def test_presets_are_hosts_and_come_back_from_their_files(tmp_path: Path) -> None:
    for name in host_presets():
        hosts = named_hosts(name)
        path = tmp_path / f"{name}.json"
        serial.write_atomic(path, serial.dumps(hosts))
        assert named_hosts(path) == hosts
        for host in hosts.hosts:
            machine = host.machine
            named = [*(x.source for x in machine.places), *(x.source for x in machine.links)]
            named += [*(x.source for x in machine.pipes), *(x.source for x in machine.rates)]
            assert all((*named, *(x.source for x in machine.memory))), name


def test_places_have_full_names() -> None:
    hosts = named_hosts("dgx-h100-128")
    names = [name for name, _ in hosts.places()]
    assert hosts.num_ranks == 1024
    assert names[:3] == ["h0.r0.gpu", "h0.cpu", "h0.nvme"]
    assert names.count("h127.cpu") == 1
    assert "h127.r7.gpu" in names
    assert next(rank.name for rank in named_hosts("home-4").ranks()) == "mac"


def test_a_ladder_is_interpolated_in_seconds() -> None:
    points = (
        LadderPoint(size_bytes=100, bandwidth_bytes_per_s=10.0),
        LadderPoint(size_bytes=300, bandwidth_bytes_per_s=15.0),
    )
    way = Interconnect(bandwidth_bytes_per_s=1e9, latency_s=1.0, points=points)
    # 10 s at 100 bytes, 20 s at 300: 15 s at 200.
    assert way.transfer_s(200) == pytest.approx(1 + 15)
    assert way.transfer_s(50) == pytest.approx(1 + 5)
    assert way.transfer_s(600) == pytest.approx(1 + 40)
    shared = replace(way, points=(), total_bytes_per_s=100.0)
    assert shared.transfer_s(50, ends=4) == pytest.approx(1 + 50 / 25)


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("ranks", 0, ".hosts[0].ranks"),
        ("count", 10**9, ".hosts[0].count"),
        ("name", "a.b", ".hosts[0].name"),
        ("shared", ("nothing",), ".hosts[0].shared[0]"),
        ("peers", None, ".hosts[0].peers"),
        ("peers", Interconnect(bandwidth_bytes_per_s=math.nan), ".hosts[0].peers"),
        ("peers", Interconnect(bandwidth_bytes_per_s=1e9, latency_s=-1.0), "latency_seconds"),
    ],
)
def test_nonsense_is_refused(field: str, value: object, path: str) -> None:
    hosts = named_hosts("dgx-h100")
    spoilt = replace(hosts.hosts[0], **{field: value})  # type: ignore[arg-type]
    with pytest.raises(FormatError) as caught:
        check_hosts(replace(hosts, hosts=(spoilt,)))
    assert path in str(caught.value)


def test_hosts_without_a_network_are_refused() -> None:
    with pytest.raises(FormatError, match="network"):
        check_hosts(replace(named_hosts("home-4"), network=None))
    with pytest.raises(StorageError, match="home-4"):
        named_hosts("nowhere")


def test_a_chain_by_hand() -> None:
    found = chain(stack(5))
    assert (found.num_layers, found.layer.weight_bytes, found.layer.out_bytes) == (5, 100 * MB, MB)
    assert (found.first.table_bytes, found.first.weight_bytes) == (50 * MB, 0)
    assert found.head_bytes == 60 * MB
    with pytest.raises(UnsupportedOpError, match="not alike"):
        chain(_with_weight(stack(5), "h.2.w", 150 * MB))
    with pytest.raises(UnsupportedOpError, match="numbered"):
        chain(_renamed(stack(1)))


def _with_weight(workload: Workload, name: str, size: int) -> Workload:
    tensors = (
        replace(tensor, size_bytes=size) if tensor.name == name else tensor
        for tensor in workload.tensors
    )
    return replace(workload, tensors=tuple(tensors))


def _renamed(workload: Workload) -> Workload:
    text = serial.dumps(workload).replace('"h.0.w"', '"w"')
    return serial.from_json(Workload, serial.parse_json(text, where="test"))


def test_one_request_gains_nothing_where_the_model_fits() -> None:
    hosts = equal_ranks(preset("h100-gen5"), 3)
    made = plan_hosts(stack(6), hosts)
    assert made.single_s == pytest.approx(made.predicted_s)
    assert any("no speed-up" in text for text in made.notes)
    assert sum(bool(stage.windows) for stage in made.stages) == 1


def test_layers_are_windows_that_follow_each_other(tmp_path: Path) -> None:
    made = plan_hosts(_large(), named_hosts("home-4"))
    spans = sorted((w.first, w.last) for stage in made.stages for w in stage.windows)
    assert spans[0][0] == 0
    assert spans[-1][1] == 39
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(spans))
    assert made.lower_bound_s <= made.predicted_s
    for stage, host in zip(made.stages, made.hosts.hosts, strict=True):
        sizes = {place.kind: place.size_bytes for place in host.machine.places}
        assert stage.gpu_bytes <= sizes.get(PlaceKind.GPU, 0)
        assert stage.cpu_bytes <= sizes[PlaceKind.CPU]
    path = tmp_path / "plan.json"
    made.save(path)
    assert HostsPlan.load(path) == made
    assert HostsPlan.load(path).digest == made.digest
    for field, value in (("num_layers", 41), ("head", "nobody"), ("lower_bound_s", 1e9)):
        replace(made, **{field: value}).save(path)  # type: ignore[arg-type]
        with pytest.raises(FormatError, match="plan again"):
            HostsPlan.load(path)


def _large() -> Workload:
    return stack(40, weight=1000 * MB)


@pytest.mark.parametrize("train", [False, True])
def test_the_digest_is_the_same_under_any_hash_seed(train: bool) -> None:
    hosts = "v100-8" if train else "home-4"
    code = (
        "from gascompile.api.plan_hosts import plan_hosts\nfrom tests.passes.stacks import stack\n"
        f"print(plan_hosts(stack(12, weight=10**9, tokens=1000), {hosts!r}, train={train}).digest)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1


def test_a_step_that_fits_is_not_sharded_for_nothing() -> None:
    made = plan_hosts(stack(8, tokens=100_000), "dgx-h100", train=True)
    assert made.binding == "compute"
    assert sum(group.layers for group in made.groups) == 8
    assert {group.params_home for group in made.groups} == {"gpu"}
    assert made.gap < 0.05


def test_more_ranks_or_memory_is_never_slower_in_training() -> None:
    hosts = named_hosts("v100-8")
    workload = stack(10, weight=1200 * MB, tokens=20_000)
    before = plan_hosts(workload, _with_gpu(hosts, 8 * 10**9), train=True)
    after = plan_hosts(workload, _with_gpu(hosts, 16 * 10**9), train=True)
    assert after.predicted_s <= before.predicted_s * (1 + 1e-3)
    assert before.peak_bytes["gpu"] <= 8 * 10**9
    assert {g.zero_stage for g in before.groups} == {3}


def test_a_step_without_room_is_refused_with_what_it_needs() -> None:
    hosts = _with_gpu(named_hosts("v100-8"), 2 * 10**9)
    with pytest.raises(InfeasiblePlanError) as caught:
        plan_hosts(stack(10, weight=1200 * MB), hosts, train=True)
    assert caught.value.tier == "gpu"
    assert caught.value.required_bytes > caught.value.limit_bytes
    with pytest.raises(UnsupportedOpError, match="kinds of hosts"):
        plan_hosts(stack(), "home-4", train=True)


def test_ranks_that_slow_each_other_down_are_named() -> None:
    workload = stack(12, weight=10**9, tokens=2000)
    made = plan_hosts(workload, equal_ranks(preset("h200-gen5"), 4), train=True)
    halved = plan_hosts(workload, equal_ranks(preset("h200-gen5"), 2), train=True)
    assert 4 / made.predicted_s < 2 / halved.predicted_s
    assert any("With 2 ranks per host" in text for text in made.notes)
    assert not any("ranks per host" in text for text in halved.notes)


def _with_gpu(hosts: Hosts, size: int) -> Hosts:
    machine = hosts.hosts[0].machine.with_place(
        Place(name="gpu", kind=PlaceKind.GPU, size_bytes=size + 10**9)
    )
    return replace(hosts, hosts=(replace(hosts.hosts[0], machine=machine),))
