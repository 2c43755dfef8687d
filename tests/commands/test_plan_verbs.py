"""The verbs that look at finished plans: simulate, explain, diff, whatif."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gascompile.api.plan import plan
from gascompile.core import serial
from gascompile.core.budget import Budget
from gascompile.core.machine import Link, Machine, Place
from gascompile.core.plan import Plan
from gascompile.core.reports import RunReport
from gascompile.core.sizes import MIB
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec
from tests.commands.command_line import failure, json_of, ok
from tests.passes.planning import workload

_BUDGET = "1MiB"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the workload of six layers of 396 KiB, each read once by an op of 0.1 ms."""
    path = tmp_path_factory.mktemp("workloads") / "toy.workload.json"
    serial.write_atomic(path, serial.dumps(workload("abcdef", seconds=1e-4)))
    return str(path)


@pytest.fixture(scope="module")
def plan_file(toy: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a plan that keeps a part of them."""
    path = tmp_path_factory.mktemp("plans") / "toy.plan.json"
    args = ("--budget", _BUDGET, "-m", "cpu-nvme", "--strategy", "largest_first")
    ok("plan", toy, *args, "-o", str(path))
    return path


def test_what_is_written_replaces_no_file_of_a_model(plan_file: Path, tmp_path: Path) -> None:
    kept = tmp_path / "model.onnx"
    kept.write_bytes(b"weights")
    for verb in (("plan", "-o"), ("simulate", "-o"), ("simulate", "--trace")):
        code, message = failure(verb[0], str(plan_file), verb[1], str(kept))
        assert code == 2
        assert "choose another name" in message
    assert kept.read_bytes() == b"weights"


@pytest.mark.parametrize("name", ["[/x]", "[bold]b[/bold]", "x[/]"])
def test_brackets_in_names_are_no_markup(plan_file: Path, tmp_path: Path, name: str) -> None:
    data = json.loads(plan_file.read_text().replace('"a"', json.dumps(name)))
    data["workload"]["name"] = name
    path = tmp_path / "named.json"
    path.write_text(json.dumps(data))
    assert name in ok("explain", str(path), name)
    assert f"Replay of {name}" in ok("simulate", str(path))
    said = ok("whatif", str(path), "--gib", "1", "--gbps", "5")
    assert f"What if, for {name}" in " ".join(said.split())
    other = path.with_name(f"no {name.replace('/', '')}.json")
    ok("diff", str(path), str(plan_file))
    assert other.name in failure("verify", str(other))[1].replace("\n", "")
    assert name in failure("explain", str(path), f"{name}no")[1]


def test_what_is_written_goes_through_links(plan_file: Path, toy: str, tmp_path: Path) -> None:
    for verb, *args in (
        ("plan", toy, "--budget", _BUDGET, "-m", "cpu-nvme", "-o"), ("simulate", str(plan_file), "--trace"),
        ("simulate", str(plan_file), "-o"), ("annotate", str(plan_file), "-o"), ("report", str(plan_file), "-o"),
    ):  # fmt: skip
        link = tmp_path / f"{verb}{args[-1]}.html"
        link.symlink_to(f"{link.name}.written")
        ok(verb, *args, str(link))
        assert link.is_symlink() and link.stat().st_size > 100


def test_report(plan_file: Path, tmp_path: Path) -> None:
    out, run = tmp_path / "plan.html", tmp_path / "run.json"
    data = json_of("report", str(plan_file), "-o", str(out), "--why", "1")
    assert (data["bytes"], data["run"]) == (out.stat().st_size, False)
    assert data["variants"] > 0
    report = RunReport(
        seconds=1.0, peak_bytes={}, link_bytes={}, stall_s=0.0, share_of_limit=1.0, paths={}
    )
    printed = {"model": Plan.load(plan_file).workload.name, "run": serial.to_json(report)}
    serial.write_atomic(run, serial.dumps({**printed, "bundle": str(plan_file)}))
    quick = ("-o", str(out), "--no-whatif", "--why", "0")
    assert json_of("report", str(plan_file), "--run", str(run), *quick)["run"]
    assert json_of("report", str(run), *quick)["run"]
    assert "open it in a browser" in ok("report", str(plan_file), *quick)
    serial.write_atomic(run, serial.dumps({**printed, "bundle": None}))
    assert "--run" in failure("report", str(run), *quick)[1]
    serial.write_atomic(run, serial.dumps({**printed, "model": "another"}))
    assert "another" in failure("report", str(plan_file), "--run", str(run), *quick)[1]
    run.write_text("{}")
    assert "neither a plan nor a run" in failure("report", str(run), *quick)[1]
    assert failure("report", str(plan_file), "-o", str(tmp_path / "plan.pdf"))[0] == 2


def test_simulate(plan_file: Path, tmp_path: Path) -> None:
    made = Plan.load(plan_file)
    out = tmp_path / "timeline.json"
    data = json_of("simulate", str(plan_file), "-o", str(out))
    assert data["timeline"]["seconds"] == pytest.approx(made.certificate.predicted_s)
    assert json.loads(out.read_text()) == data["timeline"]
    assert {stall["cause"] for stall in data["timeline"]["stalls"]} <= {
        "link busy", "memory", "bandwidth",
    }  # fmt: skip
    assert "one iteration" in ok("simulate", str(plan_file))
    shown = ok(
        "simulate", str(plan_file),
        "--trace", str(tmp_path / "trace.json"), "--picture", str(tmp_path / "plan.svg"),
    )  # fmt: skip
    assert "ui.perfetto.dev" in shown
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "nvme" in (tmp_path / "plan.svg").read_text()
    assert failure("simulate", str(plan_file), "--picture", str(tmp_path / "plan.bmp"))[0] == 2
    assert json_of("simulate", str(plan_file), "-m", "rtx4090-gen4")["machine"] == "rtx4090-gen4"
    kept = "the links are those of rtx4090-gen4"
    assert kept in " ".join(ok("simulate", str(plan_file), "-m", "rtx4090-gen4").split())
    assert kept not in " ".join(shown.split())
    code, message = failure("simulate", str(tmp_path))
    assert (code, "no bundle" in message) == (1, True)
    bare = tmp_path / "bare.json"
    serial.write_atomic(bare, serial.dumps(replace(made.machine, links=())))
    code, message = failure("simulate", str(plan_file), "-m", str(bare))
    assert (code, "no link" in message) == (2, True)


def test_diff(toy: str, plan_file: Path, tmp_path: Path) -> None:
    larger = tmp_path / "larger.json"
    ok("plan", toy, "--budget", "4MiB", "-m", "cpu-nvme", "-o", str(larger))
    same = json_of("diff", str(plan_file), str(plan_file))
    assert same["identical"]
    assert "do the same" in ok("diff", str(plan_file), str(plan_file))
    data = json_of("diff", str(plan_file), str(larger))
    assert data["change_s"] < 0
    assert not data["identical"]
    assert "cpu" in {change["after"] for change in data["homes"]}
    out = ok("diff", str(plan_file), str(larger))
    for word in ("faster", "budget of cpu", "moved over nvme->cpu", "Homes"):
        assert word in out
    assert failure("diff", str(plan_file), str(tmp_path / "absent.json"))[0] == 1


def test_whatif(toy: str, plan_file: Path) -> None:
    args = ("whatif", str(plan_file), "--gib", "0.001", "--gbps", "1")
    data = json_of(*args)
    variants = {(v["change"], v["subject"]): v for v in data["variants"]}
    assert variants["budget", "cpu"]["amount"] == round(0.001 * 2**30)
    assert variants["budget", "cpu"]["change_s"] < 0
    assert variants["bandwidth", "nvme->cpu"]["amount"] == 1e9
    assert variants["drive", "nvme"]["speedup"] > 0
    assert data["base_s"] <= Plan.load(plan_file).certificate.predicted_s * (1 + 1e-9)
    out = ok(*args)
    for word in ("a second drive", "1 GB/s more over nvme->cpu", "half the budget", "next budget"):
        assert word in out
    code, message = failure("whatif", str(plan_file), "--budget", "2MiB")
    assert (code, "finished plan" in message) == (2, True)
    assert failure("whatif", toy, "--budget", "1KiB", "-m", "cpu-nvme")[0] == 1


def test_explain_a_tensor_and_an_op(toy: str, plan_file: Path) -> None:
    plan = Plan.load(plan_file)
    streamed = next(n for n, t in plan.tensors.items() if t.home == "nvme")
    data = json_of("explain", str(plan_file), streamed)["tensor"]
    assert data["home"] == "nvme"
    assert data["transfers"]
    out = ok("explain", str(plan_file), streamed)
    for word in ("why", "prefetched", "slack", "Alternatives"):
        assert word in out
    resident = next(n for n, t in plan.tensors.items() if t.address is not None)
    assert "Alternatives" in ok("explain", str(plan_file), resident)
    assert "bound by" in ok("explain", str(plan_file), plan.ops[0].name)
    from_source = ("explain", toy, plan.ops[0].name, "--budget", _BUDGET, "-m", "cpu-nvme")
    assert json_of(*from_source)["op"]["site"] == "cpu"


def test_explain_suggests_names(plan_file: Path) -> None:
    code, message = failure("explain", str(plan_file), "opp1")
    assert code == 2
    assert "'op1'" in message
    code, message = failure("explain", str(plan_file), "a", "--budget", "2MiB")
    assert (code, "finished plan" in message) == (2, True)


def test_simulate_names_the_wait_for_an_output(tmp_path: Path) -> None:
    places = (Place.named("gpu", 200 * MIB), Place.named("cpu", 200 * MIB))
    machine = Machine(
        name="hand",
        places=places,
        links=(
            Link(source_tier="cpu", target_tier="gpu", bandwidth_bytes_per_s=MIB),
            Link(source_tier="gpu", target_tier="cpu", bandwidth_bytes_per_s=MIB),
        ),
    )
    made = workload("ab", seconds=1.0)
    # One op is done next to its weight sooner than the weight comes; what it makes comes back at the end.
    large = replace(
        made,
        tensors=(
            *(replace(t, size_bytes=64 * MIB) for t in made.tensors if t.kind == TensorKind.WEIGHT),
            *(TensorSpec(name=n, size_bytes=MIB, kind=TensorKind.OUTPUT) for n in ("ya", "yb")),
        ),
        ops=tuple(
            OpSpec(
                name=f"op-{name}",
                time_s={"gpu": 1.0, "cpu": 2.0},
                reads=(name,),
                writes=(f"y{name}",),
            )
            for name in "ab"
        ),
    )
    found = plan(large, Budget(gpu=70 * MIB), machine, time_limit_s=60)
    assert "cpu" in {op.site for op in found.ops}
    path = tmp_path / "sites.json"
    found.save(path)
    assert "end of the iteration" in ok("simulate", str(path))
