"""Calls of the model while a step is open: what eager returns, under the step's budget."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gascompile import compile_step
from gascompile.core.errors import CaptureError, ClosedStepError, InfeasiblePlanError
from gascompile.training.step import TrainingStep
from tests.integrations.generation_table import past_of
from tests.training.runs import (
    BUDGET_BYTES,
    MACHINE,
    PLANNING_S,
    adamw,
    batches,
    compiled,
    new_model,
    plain_losses,
)


def same(found: Any, wanted: Any) -> bool:
    """Return whether two results have the same structure and bits."""
    found_leaves, found_spec = torch.utils._pytree.tree_flatten(found)
    leaves, spec = torch.utils._pytree.tree_flatten(wanted)
    return found_spec == spec and all(
        torch.equal(x, y) and x.dtype == y.dtype if isinstance(y, torch.Tensor) else x == y
        for x, y in zip(found_leaves, leaves, strict=True)
    )


def test_logits_between_steps_equal_eager_and_keep_the_budget(tmp_path: Path) -> None:
    model, held_out = new_model().train(), batches(4, rows=6)[3][:, :-1]
    with compiled(model, adamw(model), tmp_path) as step:
        torch.manual_seed(5)
        losses = []
        for batch in batches(3):
            losses.append(float(step(batch)))
            model.eval()
            logits = step.model(held_out)
            assert step.last_run is not None
            assert step.last_run.peak_bytes["cpu"] <= BUDGET_BYTES - (4 << 20)
            before = logits.clone()
            step.model(batches(1, rows=6)[0][:, :-1])
            assert torch.equal(logits, before), "a result is the caller's own"
            assert not logits.requires_grad
            with torch.random.fork_rng(devices=[]):
                reference = new_model().eval()
            reference.load_state_dict(model.state_dict())
            with torch.no_grad():
                assert torch.equal(logits, reference(held_out))
            model.train()
    assert losses == plain_losses(3)


def test_a_model_in_training_mode_drops_out_and_counts_as_eager_does(tmp_path: Path) -> None:
    reference, model = new_model().train(), new_model().train()
    tokens = batches(1)[0][:, :-1]
    torch.manual_seed(3)
    with torch.no_grad():
        wanted = reference(tokens)
    with compiled(model, adamw(model), tmp_path, budget="64MiB") as step:
        torch.manual_seed(3)
        assert torch.equal(step.model(tokens), wanted)
        assert model.training
        own, wanted_norm = dict(model.norm.named_buffers()), dict(reference.norm.named_buffers())
        assert torch.equal(own["running_mean"], wanted_norm["running_mean"])
        step.model(tokens)
        assert int(dict(model.norm.named_buffers())["num_batches_tracked"]) == 2
        assert step.num_steps == 0


def test_calls_leave_a_run_as_it_was(tmp_path: Path) -> None:
    model = new_model().train()
    with compiled(model, adamw(model), tmp_path, budget="64MiB") as step:
        torch.manual_seed(5)
        losses = []
        for number, batch in enumerate(batches(3)):
            model.eval()
            step.model(batches(1, rows=1 + number)[0])
            model.train()
            losses.append(float(step(batch)))
    assert losses == plain_losses(3)


class Many(nn.Module):
    """Returns views, an input, a parameter, the same thing twice, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, mask: Any = None) -> Any:
        y = self.inner(x) * scale
        if mask is not None:
            y = y.masked_fill(mask["where"], 0.0)
        return OrderedDict(
            whole=y,
            twice=[y, (y.t(), y[0], y.expand(2, *y.shape))],
            given=x,
            weight=self.inner.weight,
            row=self.inner.weight[1],
            seen=self.seen,
            count=3,
            nothing=None,
            right=y.argmax(1),
        )


def many_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch)["whole"].square().mean()
    return loss


def many_step(model: nn.Module, folder: Path, **options: Any) -> TrainingStep:
    given = {"budget": "64MiB", "example_batch": torch.ones(4, 8), "machine": MACHINE, **options}
    return compile_step(
        model,
        many_loss,
        torch.optim.SGD(model.parameters(), lr=0.1),
        **given,
        cache_dir=folder,
        time_limit_s=PLANNING_S,
    )


def test_whatever_is_made_of_tensors_comes_out_as_the_callers_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Many(), torch.randn(4, 8)
    mask = {"where": torch.rand(4, 8) > 0.5}
    reference = copy.deepcopy(model)
    with many_step(model, tmp_path) as step, torch.no_grad():
        for args, kwargs in [((x,), {}), ((x, 2.0), {}), ((x,), {"scale": 2.0, "mask": mask})]:
            found, wanted = step.model(*args, **kwargs), reference(*args, **kwargs)
            assert same(found, wanted)
        found["weight"].zero_()
        found["row"].zero_()
        found["seen"].fill_(1.0)
        assert same(step.model(x), reference(x)), "nobody writes to the step's values"
        assert same(found["given"], x)


def test_what_cannot_be_called_is_refused_and_the_step_goes_on(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, kind: str = "") -> Any:
            found = {"whole": self.inner(x)}
            return found if not kind else object() if kind == "object" else kind

    torch.manual_seed(0)
    model = Odd()
    step = many_step(model, tmp_path, example_batch=None)
    with pytest.raises(ValueError, match="nothing is planned yet"):
        step.model(torch.ones(4, 8))
    step.prepare(torch.ones(4, 8))
    with pytest.raises(CaptureError, match=r"returns a builtins\.object"):
        step.model(torch.ones(4, 8), "object")
    with pytest.raises(CaptureError, match="returns no tensor"):
        step.model(torch.ones(4, 8), "text")
    with pytest.raises(CaptureError, match="of which it is not known"):
        step.model(object())
    with pytest.raises(InfeasiblePlanError):
        step.model(torch.ones(1 << 22, 8))
    step(torch.ones(4, 8))
    step.close()
    with pytest.raises(ClosedStepError):
        step.model(torch.ones(4, 8))


def test_calls_are_kept_and_saved_as_steps_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = Many(), torch.randn(4, 8)
    with many_step(model, tmp_path / "cache") as step:
        wanted = step.model(x)
        step.save_plan(tmp_path / "plans")
    assert {path.name for path in (tmp_path / "plans").iterdir()} == {"call-1", "update-1"}

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("nothing is captured")

    monkeypatch.setattr("gascompile.training.capture.joint.capture_joint", refused)
    with many_step(model, tmp_path / "cache") as step:
        assert same(step.model(x), wanted)
    other = tmp_path / "other"
    with many_step(model, other, plan=tmp_path / "plans", budget=None) as step:
        assert same(step.model(x), wanted)


def test_results_of_a_device_lie_with_the_caller(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Many(), torch.randn(4, 8)
    reference = copy.deepcopy(model)
    with many_step(model, tmp_path, machine="emulated") as step, torch.no_grad():
        assert same(step.model(x), reference(x))


def test_outputs_of_transformers_and_their_caches(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    reference = copy.deepcopy(model)
    tokens = torch.randint(0, 96, (2, 9))

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
        return found

    options: dict[str, Any] = {"machine": MACHINE, "cache_dir": tmp_path}
    with (
        compile_step(model, loss, adamw(model), "64MiB", tokens, **options) as step,
        torch.no_grad(),
    ):
        step(tokens)
        reference.load_state_dict(model.state_dict())
        found = step.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        wanted = reference(input_ids=tokens, use_cache=False, output_hidden_states=True)
        assert type(found) is type(wanted)
        assert torch.equal(found.logits, wanted.logits)
        assert all(map(torch.equal, found.hidden_states, wanted.hidden_states))
        found, wanted = step.model(tokens), reference(tokens)
        assert torch.equal(found.logits, wanted.logits)
        layers = zip(past_of(found).layers, past_of(wanted).layers, strict=True)
        for layer, other in layers:
            assert torch.equal(layer.keys, other.keys)
            assert torch.equal(layer.values, other.values)
