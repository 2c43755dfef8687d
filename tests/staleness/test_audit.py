"""What Python tells of functions that get other code, and what is looked at where it tells nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gascompile.capture.fingerprint import replaced
from gascompile.capture.fingerprint.audit import Heard, heard, listen


def _other(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return 3 * x


def test_other_code_of_a_function_is_heard() -> None:
    assert listen()

    def function(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
        return x

    before = heard.num_rewritten
    function.__defaults__ = ("tanh",)
    assert heard.num_rewritten == before
    function.__code__ = _other.__code__
    assert heard.num_rewritten == before + 1


def test_all_is_looked_at_each_time_where_nothing_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced, "listen", lambda: False)
    monkeypatch.setattr(replaced, "heard", Heard())
    before = {place for place, _ in replaced.replaced_functions()}
    monkeypatch.setattr(nn.functional.tanhshrink, "__code__", _other.__code__)
    now = {place for place, _ in replaced.replaced_functions()}
    assert "torch.nn.functional.tanhshrink" in now - before
