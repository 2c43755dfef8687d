"""The command line: what each verb prints, its JSON, and the exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gascompile import __version__
from gascompile.commands.running import advice
from gascompile.core import serial
from gascompile.core.plan import Plan
from gascompile.core.reports import RunReport
from tests.commands.command_line import failure as _failure
from tests.commands.command_line import json_of as _data
from tests.commands.command_line import ok as _ok
from tests.commands.command_line import run as _run

_TOY = """
import torch
from torch import nn

class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x):
        print("the model's own print")
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

def make():
    torch.manual_seed(0)
    return Toy().eval(), (torch.randn(2, 256),)

def without_inputs():
    return Toy().eval()
"""
_BUDGET = "1MiB"
_VERBS = (
    "plan",
    "annotate",
    "explain",
    "run",
    "verify",
    "simulate",
    "diff",
    "whatif",
    "calibrate",
    "doctor",
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the source of a model of 1.5 MiB in a module that can be imported."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "cli_toy_model.py").write_text(_TOY)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield "cli_toy_model:make"


@pytest.fixture(scope="module")
def plan_file(toy: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "toy.plan.json"
    _ok("plan", toy, "--budget", _BUDGET, "-m", "cpu-nvme", "-o", str(path))
    return path


@pytest.fixture(scope="module")
def bundle(toy: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "toy"
    cache = folder.parent / "cache"
    result = _ok(
        "run", toy, "--budget", _BUDGET, "--repeat", "2", "--check", "--save", str(folder),
        "--cache-dir", str(cache), "--json",
    )  # fmt: skip
    data = json.loads(result)
    assert data["check"]["bit_identical"]
    assert len(data["all_seconds"]) == 2
    assert data["run"]["peak_bytes"]["cpu"] <= 1 << 20
    assert data["run"]["link_bytes"]["nvme->cpu"] > 0
    return folder


# ---------------------------------------------------------------- the command itself


def _subprocess(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gascompile", *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_version_and_help_as_a_process() -> None:
    assert _subprocess("--version").stdout == f"gascompile {__version__}\n"
    begun_s = os.times().children_user
    shown = _subprocess("--help")
    assert shown.returncode == 0
    # A third of a second; torch alone would take two.
    assert os.times().children_user - begun_s < 1.0
    for verb in (*_VERBS, "cache"):
        assert f" {verb} " in shown.stdout
    assert "\x1b[" not in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, gascompile.cli; "
        "print([m for m in ('torch', 'transformers', 'numpy', 'pulp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("verb", [*_VERBS, "cache ls", "cache rm", "cache gc"])
def test_every_verb_has_an_example_and_json(verb: str) -> None:
    shown = _ok(*verb.split(), "--help")
    assert f"Example: gascompile {verb}" in shown.replace("\n", " ")
    assert "--json" in shown


def test_wrong_usage_as_a_process() -> None:
    done = _subprocess("plan", "--budget", "8Foo", "x:y", "--json")
    assert done.returncode == 2
    assert "8GiB" not in done.stderr
    assert "cannot read the size '8Foo'" in json.loads(done.stdout)["error"]["message"]
    done = _subprocess("nonsense")
    assert done.returncode == 2
    assert done.stdout == ""


# ---------------------------------------------------------------- plan, annotate, simulate


def test_plan_prints_a_summary(toy: str) -> None:
    out = _ok("plan", toy, "--budget", _BUDGET, "-m", "cpu-nvme")
    for word in ("budget", "planned peak", "resident in cpu", "streamed", "predicted", "lower bound",
                 "physical limit", "solver", "strategy"):  # fmt: skip
        assert word in out
    assert max(map(len, out.splitlines())) <= 80


def test_plan_json(toy: str, plan_file: Path) -> None:
    data = _data("plan", toy, "--budget", _BUDGET, "-m", "cpu-nvme")
    (cpu, nvme) = data["places"]
    assert (cpu["name"], cpu["budget_bytes"], nvme["name"]) == ("cpu", 1 << 20, "nvme")
    assert cpu["peak_bytes"] <= 1 << 20
    weights = [tensor for tensor in data["tensors"].values() if tensor["kind"] == "weight"]
    assert len(weights) == 12
    assert sum(weight["bytes"] for weight in weights) == 6 * (256 * 256 + 256) * 4
    assert serial.from_json(Plan, data).steps == Plan.load(plan_file).steps


def test_strategy_is_forced_and_checked(toy: str) -> None:
    args = ("plan", toy, "--budget", _BUDGET, "-m", "cpu-nvme", "--strategy")
    assert _data(*args, "first_fit")["strategy"] == "first_fit"
    code, message = _failure(*args, "nonsense")
    assert code == 2
    assert "first_fit" in message


def test_an_infeasible_budget_fails_with_the_smallest_one(toy: str) -> None:
    code, message = _failure("plan", toy, "--budget", "1KiB", "-m", "cpu-nvme")
    assert code == 1
    assert "smallest feasible budget" in message
    _, out, _ = _run("plan", toy, "--budget", "1KiB", "-m", "cpu-nvme", "--json")
    error = json.loads(out)["error"]
    required = error["required_bytes"]
    assert sum(demand["size_bytes"] for demand in error["demands"]) == required
    assert {"kind", "name", "op"} <= set(error["demands"][0])
    _ok("plan", toy, "--budget", str(required), "-m", "cpu-nvme")


@pytest.mark.parametrize(
    "args",
    [
        ("plan",),
        ("plan", "--ngl", "3"),
        ("plan", "--ranks", "2"),
        ("annotate", "-o", "x.json"),
        ("explain", "x"),
        ("whatif",),
    ],
)
def test_nothing_is_measured_for_a_source_that_is_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: tuple[str, ...]
) -> None:
    def measure(*_: object) -> None:
        pytest.fail("the machine was asked for")

    monkeypatch.setattr("gascompile.api.plan.machine_of", measure)
    (tmp_path / "notes.txt").write_text("no model")
    for source in ("nope", str(tmp_path / "notes.txt")):
        code, message = _failure(args[0], source, *args[1:])
        assert (code, "cannot open" in message) == (1, True), message


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("x.onnx",), 1, "a source is"),
        (("no_such_module_here:f",), 1, "cannot import"),
        (("cli_toy_model:without_inputs",), 1, "example_inputs"),
        (("x:y", "-m", "no-such-machine"), 2, "the presets are"),
        (("x:y", "-b", "1MiB", "--cpu", "1MiB", "-m", "cpu-nvme"), 2, "give one of them"),
        (("no-such.workload.json", "-m", "cpu-nvme"), 1, "cannot read"),
    ],
)
def test_plan_refuses(toy: str, args: tuple[str, ...], code: int, words: str) -> None:
    machine = () if "-m" in args else ("-m", "cpu-nvme")
    found, message = _failure("plan", *args, *machine)
    assert found == code
    assert words in message


def test_a_workload_file_is_annotated_and_planned(toy: str, tmp_path: Path) -> None:
    path = tmp_path / "toy.workload.json"
    data = _data("annotate", toy, "-m", "cpu-nvme", "-o", str(path))
    kinds = {kind["kind"]: kind for kind in data["op_kinds"]}
    linear = kinds["aten.linear.default"]
    assert linear["count"] == 6
    assert linear["flops"] == 6 * 2 * 2 * 256 * 256
    assert linear["arithmetic_intensity"] == pytest.approx(linear["flops"] / linear["bytes"])
    assert data["unknown_ops"] == []
    again = _data("annotate", str(path), "-m", "cpu-nvme")
    assert again["seconds"] == pytest.approx(data["seconds"])
    assert {kind["kind"] for kind in again["op_kinds"]} == {"linear", "relu"}
    assert "Time by op" in _ok("annotate", str(path), "-m", "cpu-nvme")
    planned = _data("plan", str(path), "--budget", _BUDGET, "-m", "cpu-nvme")
    assert any(tensor["home"] == "nvme" for tensor in planned["tensors"].values())


def test_a_directory_without_weights_is_planned_but_not_run(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    folder = tmp_path / "bert"
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=99,
        architectures=["BertModel"],
    )  # fmt: skip
    config.save_pretrained(folder)
    data = _data("plan", str(folder), "--budget", "1MiB", "-m", "cpu-nvme", "--tokens", "16")
    assert sum(tensor["home"] == "cpu" for tensor in data["tensors"].values()) > 20
    code, message = _failure("run", str(folder))
    assert code == 1
    assert "no .safetensors" in message
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    ran = _data("run", str(folder), "--budget", "256KiB", "--tokens", "16", "--check")
    assert ran["check"]["ok"]
    assert ran["run"]["peak_bytes"]["cpu"] <= 256 << 10


# ---------------------------------------------------------------- explain, verify


def test_verify_accepts_and_refuses_plans(plan_file: Path, tmp_path: Path) -> None:
    out = _ok("verify", str(plan_file))
    assert out.startswith("ok:")
    broken = json.loads(plan_file.read_text())
    broken["steps"] = [step for step in broken["steps"] if step["step"] != "wait"]
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(broken))
    code, message = _failure("verify", str(path))
    assert code == 1
    assert message
    path.write_text("{}")
    assert _failure("verify", str(path))[0] == 1
    assert _failure("verify", str(tmp_path))[0] == 1
    assert _failure("verify", str(tmp_path / "absent.json"))[0] == 1
    assert _failure("verify", str(plan_file), "--weights")[0] == 2


def test_verify_looks_at_the_files_of_a_bundle(bundle: Path) -> None:
    data = _data("verify", str(bundle), "--weights")
    assert data["ok"]
    weights = Path(data["weight_files"][0])
    raw = weights.read_bytes()
    try:
        weights.write_bytes(raw)  # another time, the same content
        _ok("verify", str(bundle))
        weights.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        assert "content" in _failure("verify", str(bundle))[1]
        weights.write_bytes(raw[:-1])
        assert "bytes" in _failure("verify", str(bundle))[1]
        weights.unlink()
        assert "cannot be opened" in _failure("verify", str(bundle))[1]
    finally:
        weights.write_bytes(raw)
    program = bundle / "program.json"
    text = program.read_text()
    try:
        program.write_text(text.replace("linear", "linaer", 1))
        assert "checksum" in _failure("verify", str(bundle))[1]
    finally:
        program.write_text(text)


# ---------------------------------------------------------------- run


def test_run_a_bundle(bundle: Path, tmp_path: Path) -> None:
    out = _ok("run", str(bundle))
    for word in ("share of limit", "stalled", "moved", "I/O path"):
        assert word in out
    save_file({"x": torch.ones(2, 256)}, tmp_path / "in.safetensors")
    _ok("run", str(bundle), "--inputs", str(tmp_path / "in.safetensors"))
    save_file({"y": torch.ones(2, 256)}, tmp_path / "in.safetensors")
    code, message = _failure("run", str(bundle), "--inputs", str(tmp_path / "in.safetensors"))
    assert (code, "its inputs are x" in message) == (2, True)
    assert _failure("run", str(bundle), "--check")[0] == 2
    assert _failure("run", str(bundle), "--weights", str(tmp_path))[0] == 1
    assert _failure("run", str(bundle), "--inputs", str(tmp_path / "absent.safetensors"))[0] == 1


def test_run_refuses_a_plan(plan_file: Path) -> None:
    code, message = _failure("run", str(plan_file))
    assert (code, "is a plan" in message) == (2, True)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [([0.1], "gascompile calibrate"), ([0.9], ""), ([4.0], "--repeat 3"), ([9.0, 4.0], "")],
)
def test_a_run_far_from_its_prediction_says_why(
    plan_file: Path, seconds: list[float], words: str
) -> None:
    made = Plan.load(plan_file)
    certificate = replace(made.certificate, predicted_s=1.0, lower_bound_s=0.9, limit_s=0.8)
    report = RunReport(
        seconds=seconds[-1],
        peak_bytes={},
        link_bytes={},
        stall_s=0.0,
        share_of_limit=1.0,
        paths={},
    )
    said = advice(replace(made, certificate=certificate), report, seconds)
    assert words in said
    assert bool(said) == bool(words)


def test_run_needs_inputs(toy: str) -> None:
    code, message = _failure("run", "cli_toy_model:without_inputs")
    assert code == 1
    assert "--inputs" in message
    code, message = _failure("run", "cli_toy_model:make", "-m", "h100-gen5")
    assert (code, "h100-gen5" in message) == (1, True)
    assert _failure("run", "cli_toy_model:make", "--any-machine")[0] == 2


# ---------------------------------------------------------------- machines


def test_calibrate_measures_and_remembers(tmp_path: Path) -> None:
    cache, out = tmp_path / "cache", tmp_path / "machine.json"
    data = _data("calibrate", "--quick", "--cache-dir", str(cache), "-o", str(out))
    assert data["format"] == "gascompile.machine/2"
    assert json.loads(out.read_text()) == data
    assert [p.read_text() for p in (cache / "machine").glob("*.json")] == [out.read_text()]
    items = _data("cache", "ls", "--cache-dir", str(cache))["items"]
    assert [item["kind"] for item in items] == ["machine"]


def test_doctor(tmp_path: Path) -> None:
    data = _data("doctor", "--cache-dir", str(tmp_path))
    assert data["healthy"]
    assert {"torch", "solver"} <= {finding["name"] for finding in data["findings"]}
    assert "ready" in _ok("doctor", "--cache-dir", str(tmp_path))


def test_doctor_fails_when_something_required_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from gascompile.machines import doctor
    from gascompile.machines.doctor import Finding, Report, Status

    finding = Finding(name="solver", status=Status.MISSING, detail="gone", remedy="get it back")
    monkeypatch.setattr(doctor, "examine", lambda cache: Report(findings=(finding,)))
    code, out, _ = _run("doctor")
    assert code == 1
    assert "get it back" in out
