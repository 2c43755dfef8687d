"""Calls that do not fit the plan are refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gascompile
from tests.integration.net import Build


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.zeros(3, 1024), r"'x' has the shape \[3, 1024\], the plan was made for \[2, 1024\]"),
        (torch.zeros(2, 1024, 1), r"'x' has the shape \[2, 1024, 1\]"),
        (torch.zeros(2, 1024, dtype=torch.float64), "'x' has the dtype torch.float64"),
        (torch.zeros(2, 1024, device="meta"), "'x' is on 'meta'"),
        (1.0, "'x' is a float"),
        ([torch.zeros(2, 1024)], "structure"),
    ],
)
def test_inputs_that_were_not_planned(build: Build, bad: Any, message: str) -> None:
    with pytest.raises(gascompile.PlanMismatchError, match=message):
        build()(bad)
