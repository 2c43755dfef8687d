"""Which backend writes kernels: none with a torch whose C++ rounds otherwise than its ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gascompile.codegen.backends import backend_of, has_compiler_for
from tests.training.runs import MACHINE


@pytest.mark.parametrize(
    ("version", "is_there"),
    [("2.11.0+cu130", False), ("2.12.1", False), ("2.13.0+cpu", True), ("3.0.0", True)],
)
def test_kernels_of_the_processor_need_a_torch_that_keeps_casts(
    version: str, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for machine in (MACHINE, replace(MACHINE, backend="emulated")):
        backend, reason = backend_of(machine)
        assert (backend is not None) == is_there
        assert bool(reason) != is_there
        assert is_there or "2.13" in reason
        assert has_compiler_for(machine) <= is_there
