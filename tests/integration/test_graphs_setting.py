"""``graphs=`` of ``compile``: what it takes, and that it changes no plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gascompile
from gascompile.core.config import CompileConfig


def test_only_known_settings_are_taken(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="graphs is one of auto, off, not 'on'"):
        CompileConfig(graphs="on")
    with_graphs, without = (CompileConfig(cache_dir=tmp_path, graphs=x) for x in ("auto", "off"))
    assert with_graphs.fingerprint_fields() == without.fingerprint_fields(), "plans are the same"


@pytest.mark.parametrize("graphs", ["auto", "off"])
def test_a_compiled_model_hands_the_setting_on(cache: Path, tmp_path: Path, graphs: str) -> None:
    model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    with gascompile.compile(model, None, (x,), cache_dir=cache, graphs=graphs) as compiled:
        torch.testing.assert_close(compiled(x), model(x).detach())
        assert compiled.graphs is None, "the processor has none"
        assert [unit.graphs for unit in compiled._gascompile.units] == [graphs]
        compiled.save(tmp_path)
    with gascompile.load(tmp_path, graphs=graphs) as loaded:
        assert [unit.graphs for unit in loaded._gascompile.units] == [graphs]
    with pytest.raises(ValueError, match="graphs is one of"):
        gascompile.load(tmp_path, graphs="on")
