"""Functions and methods of libraries that are replaced while a plan is in use: eager's results, whatever they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import gascompile
from tests.integrations.language_models import lively

TOKENS = torch.arange(8)[None]
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def new_model() -> Any:
    torch.manual_seed(0)
    return lively(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


def scaled(function: Callable[..., Any], by: float, *args: Any, **kwargs: Any) -> Any:
    found = function(*args, **kwargs)
    if isinstance(found, tuple):
        return tuple(None if value is None else by * value for value in found)
    return by * found


PLACES = [
    (modeling_llama, "apply_rotary_pos_emb"),
    (modeling_llama, "rotate_half"),
    (modeling_llama.LlamaMLP, "forward"),
    (modeling_llama.LlamaRMSNorm, "forward"),
    (nn.Linear, "forward"),
    (nn.Linear, "__call__"),
    (torch.nn.functional, "linear"),
    (ALL_ATTENTION_FUNCTIONS, "sdpa"),
]


def patch(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, by: float = 2.0) -> None:
    if isinstance(owner, Mapping):
        monkeypatch.setitem(owner, name, partial(scaled, owner[name], by))
        return
    own = getattr(owner, name)
    if isinstance(owner, type):
        monkeypatch.setattr(
            owner, name, lambda self, *a, **k: scaled(partial(own, self), by, *a, **k)
        )
    else:
        monkeypatch.setattr(owner, name, partial(scaled, own, by))


@pytest.mark.parametrize("kept", [False, True])
def test_a_patch_between_two_calls_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    if kept:
        with gascompile.compile(new_model(), "2MiB", cache_dir=tmp_path) as compiled:
            logits(compiled)
    model = new_model()
    plain = logits(model)
    with gascompile.compile(new_model(), "4MiB", cache_dir=tmp_path, fuse="off") as compiled:
        for owner, name in PLACES:
            torch.testing.assert_close(logits(compiled), plain)
            with monkeypatch.context() as patches:
                patch(patches, owner, name)
                wanted = logits(model)
                assert not torch.allclose(wanted, plain)
                torch.testing.assert_close(logits(compiled), wanted)


@pytest.mark.parametrize(("owner", "name"), [PLACES[0], *PLACES[-2:]])
def test_a_kept_plan_is_of_what_was_there_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    model = new_model()
    for by in (2.0, 3.0, 2.0):
        with monkeypatch.context() as patches:
            patch(patches, owner, name, by)
            with gascompile.compile(new_model(), None, cache_dir=tmp_path, fuse="off") as compiled:
                torch.testing.assert_close(logits(compiled), logits(model))


def test_a_method_that_a_class_gets_of_its_own_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(nn.SiLU):
        """Has the forward pass of its base until it gets one."""

    model, x = nn.Sequential(nn.Linear(4, 4), Own()), torch.ones(2, 4)
    with gascompile.compile(model, None, cache_dir=tmp_path, fuse="off") as compiled:
        torch.testing.assert_close(compiled(x), model(x))
        monkeypatch.setattr(Own, "forward", lambda self, x: -x)
        torch.testing.assert_close(compiled(x), model(x))


class Handed(nn.Module):
    """Its class gives a new object to whoever asks for the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def scaled(self, x: torch.Tensor, by: float) -> torch.Tensor:
        found: torch.Tensor = self.layer(x) * by
        return found

    forward = partialmethod(scaled, by=2.0)


@pytest.mark.parametrize("kept", [False, True])
def test_a_forward_pass_that_is_a_new_object_each_time_is_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    torch.manual_seed(0)
    model, x = Handed(), torch.ones(2, 4)
    if kept:
        with gascompile.compile(model, "1MiB", cache_dir=tmp_path) as compiled:
            compiled(x)
    with gascompile.compile(model, None, cache_dir=tmp_path) as compiled:
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
        assert "planned again" not in caplog.text
        monkeypatch.setattr(Handed, "forward", partialmethod(Handed.scaled, by=3.0))
        torch.testing.assert_close(compiled(x), model(x))


def test_a_class_gets_a_forward_pass_before_that_of_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Derived(Handed):
        """Has that of its base until it gets one."""

    model, x = Derived(), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gascompile.compile(model, None, cache_dir=tmp_path) as compiled:
        torch.testing.assert_close(compiled(x), model(x))
        monkeypatch.setattr(Derived, "forward", partialmethod(Handed.scaled, by=-1.0))
        torch.testing.assert_close(compiled(x), model(x))
    with gascompile.compile_step(
        model, lambda m, x: m(x).sum(), optimizer, None, cache_dir=tmp_path
    ) as step:
        losses = [float(step(x)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_a_step_follows_or_refuses_a_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return found

    def losses(take: Callable[[torch.Tensor], Any]) -> list[float]:
        before = float(take(TOKENS))
        with monkeypatch.context() as patches:
            patch(patches, modeling_llama.LlamaMLP, "forward")
            return [before, float(take(TOKENS))]

    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def eager(tokens: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        found = loss(model, tokens)
        found.backward()
        optimizer.step()
        return found.detach()

    ours = new_model()
    with gascompile.compile_step(
        ours, loss, torch.optim.SGD(ours.parameters(), lr=0.1), "8MiB", cache_dir=tmp_path
    ) as step:
        assert losses(step) == pytest.approx(losses(eager), rel=1e-5)
