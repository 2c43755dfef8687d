"""A cache of its own per test, with this machine measured once for all; a network to disturb."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import gascompile
from gascompile.machines.resolve import op_times_path, resolve_machine
from gascompile.runtime.transfer.engine import read_blocks
from tests.integration.fused_models import Gated
from tests.integration.net import BUDGET, Build, Net
from tests.integration.site_models import Towers


@pytest.fixture(scope="session")
def measured_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    resolve_machine(None, cache_dir=folder, read=read_blocks)
    return folder


@pytest.fixture
def cache(measured_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield an empty cache folder that already knows this machine, and the times of ops that other tests measured."""
    folder = tmp_path_factory.mktemp("cache")
    shutil.copytree(measured_cache / "machine", folder / "machine")
    yield folder
    if op_times_path(folder).exists():
        shutil.copy(op_times_path(folder), op_times_path(measured_cache))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(3)
    return Net().eval()


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 1024, generator=torch.Generator().manual_seed(4))}


@pytest.fixture
def checkpoint(net: Net, tmp_path: Path) -> Path:
    """Return a folder of two shards with an index, as Hugging Face writes them."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    names = list(net.state_dict())
    weight_map = {}
    for i, part in enumerate((names[:9], names[9:])):
        file = f"model-{i}.safetensors"
        save_file({name: net.state_dict()[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def build(checkpoint: Path, cache: Path, inputs: dict[str, torch.Tensor]) -> Build:
    def compile_it() -> gascompile.CompiledModel:
        with torch.device("meta"):
            skeleton = Net().eval()
        return gascompile.compile(
            skeleton, BUDGET, example_inputs=inputs, checkpoint=checkpoint, cache_dir=cache
        )

    return compile_it


@pytest.fixture(scope="session")
def kernels(measured_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder that tests of fused ops share, so that each kernel is compiled once."""
    folder = tmp_path_factory.mktemp("kernels")
    shutil.copytree(measured_cache / "machine", folder / "machine")
    return folder


@pytest.fixture
def towers() -> Towers:
    torch.manual_seed(1)
    return Towers().eval()


@pytest.fixture
def gated() -> Gated:
    torch.manual_seed(5)
    return Gated().eval()


@pytest.fixture
def rows() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(3, 128, generator=torch.Generator().manual_seed(6))}
