"""Words of memory that show writes past a tensor's version, and which memory is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gascompile.api import memory_cells
from gascompile.api.memory_cells import Cells


def test_a_write_past_the_version_is_seen() -> None:
    first, second = torch.ones(64), torch.ones(64)
    cells = Cells([first, None, second])
    assert cells.changed() is None
    second.numpy()[:] = 2.0
    assert cells.changed() == 2


@pytest.mark.parametrize("shared", [False, True])
def test_memory_of_a_file_is_left_alone_as_the_file_may_be_cut_short(
    shared: bool, tmp_path: Path
) -> None:
    (tmp_path / "w").write_bytes(bytes(8192))
    mapped = torch.from_file(str(tmp_path / "w"), shared=shared, size=2048)
    plain = torch.ones(64)
    cells = Cells([mapped[:1024], mapped[1024:], plain])
    mapped.numpy()[:] = 1.0
    assert cells.changed() is None, "it would be read, which ends the process once it is cut short"
    plain.numpy()[:] = 2.0
    assert cells.changed() == 2


def test_nothing_is_read_where_the_system_does_not_say_what_is_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def untold() -> list[tuple[int, int]]:
        raise FileNotFoundError

    monkeypatch.setattr(memory_cells, "file_ranges", untold)
    tensor = torch.ones(64)
    cells = Cells([tensor])
    tensor.numpy()[:] = 2.0
    assert cells.changed() is None
