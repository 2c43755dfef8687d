"""Steps give eager's bits with and without page memory, and what lies in it keeps to the plan."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile.codegen.build import has_compiler
from tests.training.trials import TRANSFER_BYTES, Trial, adamw


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    widths = (256, 320, 200, 384, 256)
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    batches = [(torch.randn(300, 256), torch.randint(10, (300,))) for _ in range(6)]
    return Trial(
        model,
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        batches,
        tmp_path,
    )


@pytest.mark.parametrize("has_pages", [True, False])
def test_equal_to_eager(trial: Trial, monkeypatch: pytest.MonkeyPatch, *, has_pages: bool) -> None:
    if not has_pages:
        monkeypatch.setattr("gascompile.codegen.allocator_library._LOADED", [None])
    elif not has_compiler():
        pytest.skip("needs a C++ compiler")
    budget = trial.smallest_budget()
    found, wanted = trial.planned(budget), trial.eager()
    assert found.plan is not None
    assert found.plan.link_bytes["nvme->cpu"] > 0
    found.assert_equals(wanted)


@pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
def test_pages_hold_no_more_than_the_plan(trial: Trial) -> None:
    budget = trial.smallest_budget()
    trial = replace(trial, planning_s=3.0)
    model = copy.deepcopy(trial.model)
    gc.collect()
    with trial.compiled(model, adamw(model), budget) as step:
        pages = step.pages
        assert pages is not None
        # What earlier tests have left alive.
        others = pages.live_bytes
        for batch in trial.batches:
            pages.mark()
            step(batch)
            assert 0 < pages.peak_bytes - others <= budget - TRANSFER_BYTES
        assert pages.moved_bytes > 0
        assert pages.resident_bytes - others <= budget - TRANSFER_BYTES
    assert pages.resident_bytes == pages.live_bytes
