"""Workloads, machines and budgets that make no sense: a typed error that names the place, on every way in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import gascompile
from gascompile.cli import app
from gascompile.core import serial
from gascompile.core.budget import Budget
from gascompile.core.checks.workload import MAX_ITEMS
from gascompile.core.errors import FormatError, StorageError, UnsupportedOpError
from gascompile.core.machine import Machine, Place
from gascompile.core.plan import Plan
from gascompile.core.workload import Workload
from tests.core.bad_files import BUDGET, MACHINE, WORKLOAD, changed, data_of, write

NAN, INF = float("nan"), float("inf")
TENSOR = {"name": "w0", "bytes": 1, "kind": "weight"}
OP = {"name": "p", "seconds": {"gpu": 1.0}}
LINK = {"from": "nvme", "to": "gpu", "bytes_per_second": 1e9}

WORKLOADS = [
    ("tensors.2.bytes", -1, "$.tensors[2].bytes: 'w2' has the size -1"),
    ("tensors.2.bytes", 2**61, "$.tensors[2].bytes: 'w2' has the size 2305843009213693952"),
    ("tensors.2.bytes", 10**30, "$.tensors[2].bytes: 1000000000000000000000000000000 is no finite number"),
    ("tensors.2.bytes", 10**4000, "$.tensors[2].bytes: an int of 13288 bits is no finite number"),
    ("tensors.2.bytes", 4096.0, "$.tensors[2].bytes: expected int, found 4096.0"),
    ("tensors.2.bytes", "4096", "$.tensors[2].bytes: expected int, found '4096'"),
    ("tensors.2.bytes", True, "$.tensors[2].bytes: expected int, found True"),
    ("tensors.2.bytes", None, "$.tensors[2].bytes: expected int, found None"),
    ("tensors.2.bytes", [[]], "$.tensors[2].bytes: expected int, found list"),
    ("tensors.2.kind", "wheel", "$.tensors[2].kind: 'wheel' is not one of"),
    ("tensors.2.kind", {}, "$.tensors[2].kind: dict is not one of"),
    ("tensors.2.name", "w0", "$.tensors[2].name: tensors[0] is called 'w0' as well"),
    ("tensors.2.name", "", "$.tensors[2].name: '' is no name"),
    ("tensors.2.name", "\x1b[2J", "$.tensors[2].name: '\\x1b[2J' is no name"),
    ("tensors.2.name", "\ud800", "$.tensors[2].name: '\\ud800' holds half a character"),
    ("tensors.2", 7, "$.tensors[2]: expected an object for TensorSpec, found 7"),
    ("tensors", {}, "$.tensors: expected a list, found dict"),
    ("ops", [], "$.ops: a workload needs at least one op"),
    ("ops.1.name", "p", "$.ops[1].name: ops[0] is called 'p' as well"),
    ("ops.1.reads.0", "c", "$.ops[1].reads[0]: op 'q': no tensor is called 'c'"),
    ("ops.1.writes.0", "c", "$.ops[1].writes[0]: op 'q': no tensor is called 'c'"),
    ("ops.1.reads", "w0", "$.ops[1].reads: expected a list, found 'w0'"),
    ("ops.0.reads.0", "b", "$.ops[0].reads[0]: op 'p': it reads the activation 'b' before any op"),
    ("ops.0.reads.0", "o", "$.ops[0].reads[0]: op 'p': it reads the output 'o' before any op"),
    ("ops.0.seconds", {}, "$.ops[0].seconds: op 'p': it has no time"),
    ("ops.0.seconds.gpu", -1e-3, "$.ops[0].seconds.gpu: op 'p': it takes -0.001 s"),
    ("ops.0.seconds.gpu", 1e30, "$.ops[0].seconds.gpu: op 'p': it takes 1e+30 s"),
    ("ops.0.seconds.gpu", "1", "$.ops[0].seconds.gpu: expected float, found '1'"),
    ("ops.0.seconds.gpu", 10**400, "$.ops[0].seconds.gpu: an int of 1329 bits is no finite number"),
    ("ops.0.workspace_bytes", -1, "$.ops[0].workspace_bytes: op 'p': -1 is less than zero"),
    ("ops.0.flops", -1, "$.ops[0].flops: op 'p': -1 is less than zero"),
    ("ops.0.splits", {"w1": 2}, "$.ops[0].splits.w1: op 'p': 'w1' is no weight that it reads"),
    ("ops.0.splits", {"w0": 0}, "$.ops[0].splits.w0: op 'p': 'w0' has 0 rows"),
    ("ops.2.gathers", {"w2": 2**30}, "$.ops[2].gathers.w2: op 'r': it needs 1073741824 bytes of 'w2'"),
    ("ops.0.colour", "red", "$.ops[0]: unknown field 'colour' in OpSpec"),
    ("repeats", "yes", "$.repeats: expected bool, found 'yes'"),
    ("name", None, "$.name: expected str, found None"),
    ("format", "gascompile.workload/2", "$: this reader knows the format 'gascompile.workload/1'"),
    ("format", [1], "the data says list"),
]  # fmt: skip
MACHINES = [
    ("places", [], "$.places: a machine needs a place of the kind 'gpu' or 'cpu'"),
    ("places", [{"name": "gpu", "kind": "nvme", "bytes": 1}], "$.places: a machine needs a place of the kind 'gpu'"),
    ("places", {"cpu": {"bytes": 1}}, "$.places: expected a list, found dict"),
    ("places.1.kind", "gpu", "$.places: 'gpu' and 'cpu' are both of the kind 'gpu'"),
    ("places.1.kind", "tape", "$.places[1].kind: 'tape' is not one of ['gpu', 'cpu', 'nvme', 'other']"),
    ("places.1.bytes", -1, "$.places[1].bytes: the place has the size -1"),
    ("places.1.bytes", 2**62, "$.places[1].bytes: the place has the size 4611686018427387904"),
    ("places.1.name", "gpu", "$.places[1].name: places[0] is called 'gpu' as well"),
    ("places.1.name", "", "$.places[1].name: '' is no name of a place"),
    ("places.1.name", "a->b", "$.places[1].name: 'a->b' is no name of a place"),
    ("places.1.name", "x" * 65, f"$.places[1].name: '{'x' * 65}' is no name of a place"),
    ("places.1.name", "\n", "$.places[1].name: '\\n' is no name of a place"),
    ("links.2.from", "tape", "$.links[2].from: the machine has no place 'tape'; it has gpu, cpu, nvme"),
    ("format", "gascompile.machine/1", "$: the field 'tiers' of MachineOne is missing"),
    ("format", "gascompile.machine/3", "$: this reader knows the format 'gascompile.machine/2'"),
    ("links.2.to", "cpu", "$.links[2]: the link goes from 'cpu' to itself"),
    ("links.2", LINK, "$.links[2]: links[0] is called nvme->gpu as well"),
    ("links.2.shared", ["straw"], "$.links[2].shared[0]: the machine has no pipe 'straw'"),
    ("links.2.bytes_per_second", 0, "$.links[2].bytes_per_second: the rate 0.0 is not a positive number"),
    ("links.2.bytes_per_second", -1.0, "$.links[2].bytes_per_second: the rate -1.0 is not a positive"),
    ("links.2.bytes_per_second", 1e-300, "$.links[2].bytes_per_second: the rate 1e-300 per second is not"),
    ("links.2.bytes_per_second", 1e300, "$.links[2].bytes_per_second: the rate 1e+300 per second is not"),
    ("links.2.latency_seconds", -1.0, "$.links[2].latency_seconds: the fixed cost -1.0 is not within"),
    ("links.2.latency_seconds", 1e12, "$.links[2].latency_seconds: the fixed cost 1000000000000.0 is not"),
    ("links.2.pipe_bytes_per_byte", 0.0, "$.links[2].pipe_bytes_per_byte: a byte takes 0.0 bytes of its pipes, which"),
    ("links.2.pipe_bytes_per_byte", 1e9, "$.links[2].pipe_bytes_per_byte: a byte takes 1000000000.0 bytes of its"),
    ("pipes.1.bytes_per_second", 0, "$.pipes[1].bytes_per_second: the rate 0.0"),
    ("pipes.1.name", "nvme-read", "$.pipes[1]: pipes[0] has pipe 'nvme-read' as well"),
    ("rates.0.flops_per_second", 0, "$.rates[0].flops_per_second: the rate 0.0"),
    ("rates.1.dtype", "float32", "$.rates[1]: rates[0] has float32 on 'gpu' as well"),
    ("memory.0.op_overhead_seconds", -1.0, "$.memory[0].op_overhead_seconds: the fixed cost -1.0"),
    ("memory.1.device", "gpu", "$.memory[1]: memory[0] has device 'gpu' as well"),
    ("io.num_threads", 0, "$.io: io needs at least one thread"),
    ("io.num_threads", 1_000_000, "$.io: io has 1000000 threads and chunks of"),
    ("io.chunk_bytes", 1 << 40, "$.io: io has 4 threads and chunks of 1099511627776; give at most"),
    ("links", {}, "$.links: expected a list, found dict"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "message"), WORKLOADS, ids=[row[2][:50] for row in WORKLOADS]
)
def test_a_bad_workload_file(tmp_path: Path, path: str, value: Any, message: str) -> None:
    file = write(tmp_path / "x.workload.json", changed(data_of("workload"), path, value))
    with pytest.raises(FormatError, match=re.escape(f"{file}: ") + ".*" + re.escape(message)):
        gascompile.plan(file, BUDGET, MACHINE)


@pytest.mark.parametrize(
    ("path", "value", "message"), MACHINES, ids=[row[2][:50] for row in MACHINES]
)
def test_a_bad_machine_file(tmp_path: Path, path: str, value: Any, message: str) -> None:
    file = write(tmp_path / "mine.json", changed(data_of("machine"), path, value))
    with pytest.raises(FormatError, match=re.escape(f"{file}: {message}")):
        gascompile.plan(WORKLOAD, BUDGET, file)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    ("kind", "path"), [("workload", "ops.0.seconds.gpu"), ("machine", "links.0.bytes_per_second")]
)
def test_what_is_no_number_in_json(tmp_path: Path, kind: str, path: str, value: float) -> None:
    file = write(tmp_path / "x.json", changed(data_of(kind), path, value))
    source, machine = (file, MACHINE) if kind == "workload" else (WORKLOAD, file)
    with pytest.raises(FormatError, match=r"x\.json is not valid JSON: .* is not a number in JSON"):
        gascompile.plan(source, BUDGET, machine)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe{\x00}\x00", "is not a text file in UTF-8, so not JSON; save it in UTF-8"),
        (b"\x93NUMPY\x01\x00v", "is not a text file in UTF-8, so not JSON; give one that this package wrote"),
        (b"\xef\xbb\xbf{}", "is not valid JSON: Unexpected UTF-8 BOM"),
        (b'{"name": 1, "name": 2}', "the key 'name' stands twice in one object"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"1" * 10_000, "is not valid JSON: Exceeds the limit"),
        (b'{"format": "gascompile.workload/1", "tensors": 1e999}', "the field 'name' of Workload is missing"),
        (b"null", "expected an object for Workload, found None"),
        (b'"' + b"x" * 10_000 + b'"', r"found 'x{76}\.\.\.$"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_json(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "x.workload.json"
    path.write_bytes(text)
    with pytest.raises(FormatError, match=message):
        gascompile.plan(path, BUDGET, MACHINE)


def test_a_truncated_file(tmp_path: Path) -> None:
    text = serial.dumps(WORKLOAD)
    path = tmp_path / "x.workload.json"
    for length in range(0, len(text), 97):
        path.write_text(text[:length])
        with pytest.raises(FormatError, match="is not valid JSON"):
            gascompile.plan(path, BUDGET, MACHINE)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    for name in ("folder.json", "absent.json"):
        with pytest.raises(StorageError, match=name):
            gascompile.plan(tmp_path / name, BUDGET, MACHINE)


def test_an_op_without_a_time_for_this_machine(tmp_path: Path) -> None:
    message = r"\$\.ops\[1\]\.seconds: op 'q' has no time for tier 'cpu'"
    with pytest.raises(UnsupportedOpError, match=message):
        gascompile.plan(WORKLOAD, BUDGET, "cpu-nvme")
    file = write(tmp_path / "x.workload.json", data_of("workload"))
    with pytest.raises(UnsupportedOpError, match=message):
        gascompile.plan(file, BUDGET, "cpu-nvme")


def test_a_million_tensors_are_refused_before_they_are_built(tmp_path: Path) -> None:
    path = tmp_path / "x.workload.json"
    tensors = ",".join([json.dumps(TENSOR)] * 1_000_000)
    ops = json.dumps([OP])
    path.write_text(
        f'{{"format":"gascompile.workload/1","name":"m","repeats":true,"tensors":[{tensors}],"ops":{ops}}}'
    )
    with pytest.raises(FormatError, match=r"\$\.tensors: 1000000 of them, at most"):
        gascompile.plan(path, BUDGET, MACHINE)
    for field in ("tensors", "ops"):
        many = replace(WORKLOAD, **{field: getattr(WORKLOAD, field)[:1] * (MAX_ITEMS + 1)})
        with pytest.raises(FormatError, match=rf"\$\.{field}: {MAX_ITEMS + 1} of them"):
            gascompile.plan(many, BUDGET, MACHINE)


# ---------------------------------------------------------------- what is built in Python

WRONG: Any = None
TEXT: Any = "1GB"


def with_op(**changes: Any) -> Workload:
    return replace(WORKLOAD, ops=(replace(WORKLOAD.ops[0], **changes), *WORKLOAD.ops[1:]))


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (with_op(time_s={"gpu": NAN}), "workload 'three ops': $.ops[0].seconds.gpu: nan is no finite"),
        (with_op(time_s={"gpu": INF}), "$.ops[0].seconds.gpu: inf is no finite"),
        (with_op(time_s={"gpu": -1.0}), "$.ops[0].seconds.gpu: op 'p': it takes -1.0 s"),
        (with_op(time_s=1.0), "$.ops[0].seconds: expected an object, found 1.0"),
        (with_op(reads="w0"), "$.ops[0].reads: expected a list, found 'w0'"),
        (with_op(reads=("nobody",)), "$.ops[0].reads[0]: op 'p': no tensor is called 'nobody'"),
        (with_op(workspace_bytes=np.int64(4)), "int64 is not JSON data; use plain numbers"),
        (replace(WORKLOAD, tensors=WRONG), "$.tensors: expected a list, found None"),
        (replace(WORKLOAD, ops=()), "$.ops: a workload needs at least one op"),
    ],
)  # fmt: skip
def test_a_bad_workload_from_python(workload: Workload, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        gascompile.plan(workload, BUDGET, MACHINE)


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (replace(MACHINE, links=(replace(MACHINE.links[0], bandwidth_bytes_per_s=NAN),)), "nan is no finite"),
        (replace(MACHINE, links=(replace(MACHINE.links[0], bandwidth_bytes_per_s=TEXT),)), "expected float"),
        (replace(MACHINE, places=(Place.named("gpu", -1),), links=()), "$.places[0].bytes: the place has the size -1"),
        (replace(MACHINE, places=()), "machine 'h100-gen5': $.places: a machine needs"),
    ],
)  # fmt: skip
def test_a_bad_machine_from_python(machine: Machine, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        gascompile.plan(WORKLOAD, BUDGET, machine)


def test_lists_are_as_good_as_tuples() -> None:
    lists: Any = with_op(reads=["x", "w0"], writes=["a"])
    assert gascompile.plan(lists, BUDGET, MACHINE).certificate.predicted_s > 0


@pytest.mark.parametrize(
    "limit",
    [-1, NAN, 1.5, True, "", "-1GiB", "nan", "8 parsecs", "9" * 400 + "GiB", 10**400],
    ids=lambda limit: ascii(limit)[:12],
)
def test_a_bad_budget(limit: Any) -> None:
    for budget in (limit, Budget(gpu=limit), Budget(cpu=limit)):
        with pytest.raises(ValueError, match=r"a size|the size"):
            gascompile.plan(WORKLOAD, budget, MACHINE)


@pytest.mark.parametrize("source", [None, 7, {"ops": []}, b"x.json"])
def test_a_source_that_is_nothing_of_the_kind(source: Any) -> None:
    with pytest.raises(TypeError, match=r"a source is .*, not (NoneType|int|dict|bytes)"):
        gascompile.plan(source, BUDGET, MACHINE)


# ---------------------------------------------------------------- on the command line


def failure(*args: str) -> tuple[int, str]:
    """Return the exit code and the message, which is the same with and without ``--json``."""
    plain = CliRunner().invoke(app, list(args), catch_exceptions=False)
    shown = CliRunner().invoke(app, [*args, "--json"], catch_exceptions=False)
    assert shown.exit_code == plain.exit_code
    assert plain.stdout == ""
    message = json.loads(shown.stdout)["error"]["message"]
    if plain.exit_code == 1:
        assert message in plain.stderr
    return plain.exit_code, message


def test_bad_files_on_the_command_line(tmp_path: Path) -> None:
    good = str(write(tmp_path / "good.workload.json", data_of("workload")))
    bad = str(
        write(tmp_path / "bad.workload.json", changed(data_of("workload"), "ops.1.reads.0", "c"))
    )
    odd = str(write(tmp_path / "odd.json", changed(data_of("machine"), "links.2.to", "cpu")))
    message = f"{bad}: $.ops[1].reads[0]: op 'q': no tensor is called 'c'; add it to tensors"
    for verb in ("plan", "annotate"):
        assert failure(verb, bad, "-m", "h100-gen5") == (1, message)
    assert failure("explain", bad, "p", "-m", "h100-gen5") == (1, message)
    assert failure("annotate", bad, "-m", "h100-gen5", "-o", str(tmp_path / "out.json"))[0] == 1
    assert not (tmp_path / "out.json").exists()
    code, message = failure("annotate", good, "-m", "cpu-nvme")
    assert (code, "$.ops[1].seconds" in message) == (1, True)
    code, message = failure("plan", good, "-m", odd)
    assert (code, "$.links[2]: the link goes from 'cpu' to itself" in message) == (1, True)
    for budget in ("nan", "-1", "9" * 400 + "GiB"):
        code, message = failure("plan", good, "-m", "h100-gen5", f"--budget={budget}")
        assert (code, "--budget" in message) == (2, True)
    assert failure("plan", good, "-m", "h100-gen5", "--time-limit=nan")[0] == 2


def test_bad_plans_on_the_command_line(tmp_path: Path) -> None:
    for text in ("", "[" * 100_000, "[1]", "{}", '{"format": "gascompile.plan/1"}', "NaN"):
        path = tmp_path / "plan.json"
        path.write_text(text)
        assert failure("verify", str(path))[0] == 1
        assert failure("simulate", str(path))[0] == 1
        machine = () if "plan/1" in text else ("-m", "h100-gen5")
        assert failure("explain", str(path), "w0", *machine)[0] == 1


@pytest.mark.parametrize(
    "option",
    ["--gib=1e300", "--gib=inf", "--gib=nan", "--gbps=-1", "--time-limit=inf", "--batch=0"],
)
def test_numbers_beyond_reason_are_wrong_usage(tmp_path: Path, option: str) -> None:
    good = str(write(tmp_path / "good.workload.json", data_of("workload")))
    assert failure("whatif", good, "-m", "h100-gen5", option)[0] == 2


@pytest.mark.parametrize("verb", ["plan", "annotate", "verify", "simulate", "run"])
def test_paths_that_name_no_file(tmp_path: Path, verb: str) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in (f"{tmp_path}/{'a/' * 2500}x", str(tmp_path / "pipe.json"), "/dev/zero"):
        assert failure(verb, path)[0] == 1


def test_planning_a_workload_loads_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path / "x.workload.json", data_of("workload"))
    args = ["gascompile", "plan", str(path), "--machine", "h100-gen5", "--budget", "1GiB", "--json"]
    code = (
        f"import sys; sys.argv = {args!r}\n"
        "from gascompile.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    sys.stderr.write(str('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "False"
    planned = serial.from_json(Plan, json.loads(done.stdout))
    assert planned.budget_bytes["gpu"] == 1 << 30
