"""Models written as ONNX: equal to eager in onnxruntime, weights in place or copied, files whole, plans noted."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import gascompile
from gascompile.cli import app
from gascompile.core.errors import (
    CaptureError,
    CheckpointError,
    StorageError,
    UnsupportedOpError,
)
from gascompile.integrations.onnx.export import OnnxExport
from tests.integrations import test_onnx_outlines as outlines
from tests.integrations.onnx_models import INPUTS, Net, assert_close, by_runtime, net, onnx
from tests.zoo import assert_same, eager, make


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
    # A model of another folder, which nobody can know of, reads the data that the next one leaves.
    (tmp_path / "sub").mkdir()
    gascompile.export(model, tmp_path / "sub" / "m.onnx", inputs)
    above = onnx.load(tmp_path / "sub" / "m.onnx", load_external_data=False)
    for tensor in above.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = f"sub/{entry.value}"
    (tmp_path / "above.onnx").write_bytes(above.SerializeToString())
    found = gascompile.export(model, tmp_path / "sub" / "m.onnx", inputs, overwrite=True)
    assert found.written.left == (tmp_path / "sub" / "m.onnx.data",)
    assert files(tmp_path / "sub") == {"m.onnx", "m.onnx.data", "m.onnx.2.data"}
    for name in ("above.onnx", "sub/m.onnx"):
        by_runtime(tmp_path / name, {"input": inputs[0]})


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
    calls: torch.Tensor

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
        found: torch.Tensor = torch.linalg.lu_factor(x)[0]
        return found


class Returns(nn.Module):
    """Returns what is no tensor beside one."""

    def __init__(self, *, size: bool) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"double": 2 * x, "others": [None, x.shape[0] if self.size else 7]}


@pytest.mark.parametrize("size", [False, True])
def test_an_output_that_is_no_tensor_is_named(size: bool, tmp_path: Path) -> None:
    what = "a size" if size else "the constant 7"
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=8)}}
    with pytest.raises(
        UnsupportedOpError, match=rf"'others\.1' of Returns is {what}.*torch\.tensor"
    ):
        gascompile.export(
            Returns(size=size), tmp_path / "m.onnx", {"x": torch.ones(3, 4)}, dynamic_shapes=shapes
        )
    assert not files(tmp_path)


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


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name",
    ["convnet", slow("llama"), slow("bert"), slow("gpt2"), slow("vit"), slow("clip"), slow("whisper"), slow("t5"),
     slow("gemma3"), slow("mamba2"), slow("hubert"), slow("tied")],
)  # fmt: skip
def test_families_go_there_and_back(name: str, tmp_path: Path) -> None:
    model, inputs = make(name)
    wanted = eager(model, inputs)
    found: OnnxExport = gascompile.export(model, tmp_path / "m.onnx", inputs, cache_dir=tmp_path)
    assert_close(by_runtime(tmp_path / "m.onnx", inputs), wanted)
    tensors = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    assert found.inputs == tuple(tensors)
    outlines.assert_same(*outlines.both(tmp_path / "m.onnx", tmp_path / "c"))
    compiled = gascompile.compile(
        tmp_path / "m.onnx", machine="emulated", cache_dir=tmp_path / "c", fuse="off"
    )
    outputs = compiled(**tensors)
    compiled.close()
    assert_same(outputs, [value for value in wanted if isinstance(value, torch.Tensor)])


class Experts(nn.Module):
    """Rows by experts, of which one has none and some rows have none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrices = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        # Of float32; torch's own op is of bfloat16 in a trace.
        found: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(x, self.matrices, ends)
        return found


def test_groups_of_rows_are_products_of_slices(tmp_path: Path) -> None:
    pytest.importorskip("transformers.integrations.moe")
    model = Experts().eval()
    inputs = {"x": torch.randn(6, 8), "ends": torch.tensor([2, 2, 6], dtype=torch.int32)}
    gascompile.export(model, tmp_path / "m.onnx", inputs)
    for ends in ([2, 2, 6], [0, 5, 6], [6, 6, 6], [1, 1, 4]):
        bounds = [0, *ends]
        wanted = torch.zeros(6, 16)
        for expert, (begin, end) in enumerate(itertools.pairwise(bounds)):
            wanted[begin:end] = inputs["x"][begin:end] @ model.matrices[expert].detach()
        given = inputs | {"ends": torch.tensor(ends, dtype=torch.int32)}
        assert_close(by_runtime(tmp_path / "m.onnx", given), [wanted])
    with pytest.raises(CaptureError, match="is computed from the model's inputs"):
        gascompile.plan(tmp_path / "m.onnx", machine="cpu-nvme", cache_dir=tmp_path)


@pytest.mark.parametrize("name", [slow("mixtral"), slow("deepseek_v3")])
def test_mixtures_of_experts_are_written(name: str, tmp_path: Path) -> None:
    """They are for other runtimes: which rows an expert has is known at each call alone, so no plan is made of it."""
    model, inputs = make(name)
    wanted = eager(model, inputs)
    gascompile.export(model, tmp_path / "m.onnx", inputs, cache_dir=tmp_path)
    assert_close(by_runtime(tmp_path / "m.onnx", inputs), wanted)
