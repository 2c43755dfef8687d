"""One small, good file of every format that the project reads."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import gascompile
from gascompile.api.plan_hosts import plan_hosts
from gascompile.core import serial
from gascompile.core.checks.hosts import named_hosts
from gascompile.core.checks.machine_files import preset
from gascompile.core.plan import Plan
from gascompile.core.reports import RunReport, Stall
from gascompile.formats.layout import BLOCKS
from tests.core.bad_files import MACHINE, WORKLOAD, plan
from tests.fuzz import onnx_files
from tests.gguf_files import TYPES, random_blocks
from tests.passes.stacks import stack

INPUT_SHAPE = (3, 8)
OLDER = Path(__file__).parent.parent / "core" / "older"


class Net(nn.Module):
    """A few kinds of ops and weights, a state, an output of several parts."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.first = nn.Linear(8, 64)
        self.second = nn.Linear(64, 64)
        self.last = nn.Linear(64, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        x = self.table(tokens)
        x = functional.gelu(self.first(x), approximate="tanh")
        a, b = torch.cat([x, self.second(x)], -1).chunk(2, -1)
        found = self.last(a.softmax(-1) + b.transpose(0, 1).contiguous().transpose(0, 1)) * scale
        return {"found": found, "mean": found.mean(dim=1, dtype=torch.float32)}


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of the bundle."""
    return torch.arange(24).reshape(INPUT_SHAPE) % 16, torch.full((1,), 0.5)


def _write_gguf(path: Path) -> None:
    """Write a file of every kind of value and of several types of tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_add_bos_token(True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
    for form in BLOCKS:
        rows = random_blocks(form, 3, 256).numpy()
        writer.add_tensor(f"blk.0.{form}.weight", rows, raw_dtype=TYPES[form])
    writer.add_tensor("output_norm.weight", torch.ones(5).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _run(made: Plan) -> dict[str, object]:
    """Return what ``gascompile run --json`` prints."""
    links = [link.name for link in made.machine.links]
    report = RunReport(
        seconds=0.5,
        peak_bytes=made.peak_bytes,
        link_bytes=dict.fromkeys(links, 4096),
        stall_s=0.1,
        share_of_limit=0.8,
        paths=dict.fromkeys(links, "O_DIRECT"),
        stalls=(Stall(op=0, time_s=0.1, cause="bandwidth", tensor="w"),),
    )
    return {"model": made.workload.name, "bundle": None, "run": serial.to_json(report)}


def make_seeds(folder: Path) -> None:
    """Write every seed below ``folder``."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    net = Net().eval()
    weights = {n: p.detach().clone() for n, p in net.state_dict().items() if n != "calls"}
    (folder / "model").mkdir()
    save_file(weights, folder / "model" / "model.safetensors")
    dims = {"tokens": {0: torch.export.Dim("rows", min=2, max=4)}, "scale": None}
    compiled = gascompile.compile(
        net,
        "4MiB",
        inputs(),
        dynamic_shapes=dims,
        machine=preset("cpu-nvme"),
        cache_dir=folder / "cache",
        time_limit_s=2,
        strategy="all_streamed",
        fuse="off",
    )
    with compiled:
        compiled.save(folder / "bundle")
    (folder / "sharded").mkdir()
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / "sharded" / shard)
    index = {"metadata": {}, "weight_map": {n: s for s, held in shards.items() for n in held}}
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "gguf").mkdir()
    _write_gguf(folder / "gguf" / "model.gguf")
    onnx_files.make_seeds(folder / "onnx")
    made = plan()
    hosts = replace(named_hosts("home-4"), hosts=named_hosts("home-4").hosts[:2])
    over = plan_hosts(stack(2), hosts)
    values = {
        "workload": WORKLOAD,
        "machine": MACHINE,
        "plan": made,
        "hosts": hosts,
        "hosts_plan": over,
    }
    for kind, value in values.items():
        (folder / f"{kind}.json").write_text(serial.dumps(value))
    # As the version before wrote them.
    for kind, name in (("plan_one", "again.plan.json"), ("machine_one", "machine.json")):
        (folder / f"{kind}.json").write_bytes((OLDER / name).read_bytes())
    (folder / "run.json").write_text(serial.dumps(_run(made)))
    for path in folder.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert os.listdir(folder)
