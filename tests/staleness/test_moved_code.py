"""Kept plans of code whose file lies elsewhere than before, or in no file: what it reads counts all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import functools
import sys
import torch
from torch import nn
import gascompile

numbers = {"scale": 1.0}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    @functools.singledispatchmethod
    def scale(self, x):
        return x * numbers["scale"]

    def forward(self, x):
        return self.linear(x) * numbers["scale"] if HOW == "plain" else self.scale(self.linear(x))

def loss(model, x):
    return model(x).square().mean() * numbers["scale"]

torch.manual_seed(0)
x = torch.randn(4, 16)
options = {"machine": "cpu-nvme", "fuse": "off", "cache_dir": CACHE}
if KIND == "inference":
    model = Net().eval()
    found, expected = gascompile.compile(model, "64MiB", (x,), **options), model
else:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    found = gascompile.compile_step(model, loss, optimizer, "64MiB", x, time_limit_s=0.2, **options)
    twin = Net()
    twin.load_state_dict(model.state_dict())
    expected = functools.partial(loss, twin)
with found:
    for scale in (1.0, 2.0):
        numbers["scale"] = scale
        with torch.no_grad():
            wanted = expected(x)
        torch.testing.assert_close(torch.as_tensor(found(x)), wanted)
print("equal")
"""


def _script(kind: str, how: str, cache: Path) -> str:
    return f"KIND, HOW, CACHE = {kind!r}, {how!r}, {os.fspath(cache)!r}\n{SCRIPT}"


def _output(arguments: list[str], folder: Path, text: str | None = None) -> str:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        check=False,
        cwd=folder,
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


@pytest.mark.parametrize(
    ("kind", "how"), [("inference", "plain"), ("inference", "dispatched"), ("training", "plain")]
)
def test_a_copy_of_a_program_reads_its_values_anew(tmp_path: Path, kind: str, how: str) -> None:
    for name in ("first", "second", "second"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "program.py").write_text(_script(kind, how, tmp_path / "cache"))
        assert _output(["program.py"], folder) == "equal\n"


def test_a_program_that_is_read_from_standard_input_reads_its_values_anew(tmp_path: Path) -> None:
    for _ in range(2):
        text = _script("training", "plain", tmp_path / "cache")
        assert _output(["-"], tmp_path, text) == "equal\n"
