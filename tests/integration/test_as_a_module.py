"""A compiled model in the place of its model: what libraries and users do with a module works, or is refused."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

import gascompile
from gascompile.core.errors import CompiledModelError, GASCompileError


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.scale = 2.0

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        """Return something of everything."""
        return torch.as_tensor(self.norm(self.inner(x)) * self.scale + shift)

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self(x) * 2)


@pytest.fixture
def model() -> Small:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture
def compiled(model: Small, cache: Path) -> Any:
    with gascompile.compile(model, "1MiB", machine="cpu-nvme", cache_dir=cache) as compiled:
        yield compiled


X = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))


def eager(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(*args, **kwargs)


def test_it_is_one_of_its_class(model: Small, compiled: Any) -> None:
    assert isinstance(compiled, Small)
    assert isinstance(compiled, gascompile.CompiledModel)
    assert type(compiled).__name__ == "Small"
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    assert compiled.scale == 2.0
    assert compiled.inner is model.inner
    assert (compiled.device, compiled.dtype) == (torch.device("cpu"), torch.float32)
    assert [name for name, _ in compiled.named_parameters()] == list(dict(model.named_parameters()))
    # A method of the model runs the plan, not the model's own forward.
    assert torch.equal(compiled.twice(X), eager(model, X) * 2)
    assert compiled.last_run is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = compiled.nothing


def test_what_is_set_on_it_is_set_on_the_model(model: Small, compiled: Any) -> None:
    compiled.scale = 3.0
    assert model.scale == 3.0
    assert torch.equal(compiled(X), eager(model, X))
    compiled.train()
    assert model.training
    assert model.norm.training
    twin = copy.deepcopy(model)
    assert torch.equal(compiled(X), eager(twin, X))
    torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean)
    assert not compiled.eval().training
    with pytest.raises(AttributeError, match="plan"):
        compiled.plan = None


def test_weights_that_change_are_planned_anew(model: Small, compiled: Any) -> None:
    before = compiled(X)
    with torch.no_grad():
        model.inner.weight.mul_(2)
    assert not torch.equal(compiled(X), before)
    assert torch.equal(compiled(X), eager(model, X))
    model.inner.bias = nn.Parameter(torch.ones(16))
    assert torch.equal(compiled(X), eager(model, X))
    # Freed, values stay those in files.
    wanted = eager(model, X)
    model.inner.to("meta")
    assert torch.equal(compiled(X), wanted)


def test_a_part_of_a_larger_module(model: Small, compiled: Any) -> None:
    head = nn.Linear(16, 2)
    whole = nn.Sequential(compiled, head)
    assert list(whole.state_dict()) == list(nn.Sequential(model, head).state_dict())
    assert torch.equal(eager(whole, X), eager(nn.Sequential(model, head), X))
    whole(X).sum().backward()
    assert head.weight.grad is not None
    assert "CompiledModel(Small, 1 plan(s))" in repr(whole)
    assert whole.to("cpu").float() is whole
    with pytest.raises(CompiledModelError, match="float16"):
        whole.half()
    with pytest.raises(CompiledModelError, match="from where they were"):
        whole.load_state_dict(whole.state_dict())


def test_gradients_for_inputs_are_refused(compiled: Any) -> None:
    x = X.clone().requires_grad_()
    found = compiled(x)
    with pytest.raises(CompiledModelError, match="compile_step"):
        found.sum().backward()
    with torch.no_grad():
        assert not compiled(x).requires_grad


def test_a_head_is_not_trained_over_parameters_that_would_stay_as_they_are(model: Small) -> None:
    head = nn.Linear(16, 2)
    with gascompile.compile(model.train(), "1MiB") as compiled:
        with pytest.raises(CompiledModelError, match="compile_step"):
            head(compiled(X)).sum().backward()
        found = compiled(X)
        found += 1  # as what eager returns, it may be written to
        assert torch.equal(found, eager(model, X) + 1)
        with torch.no_grad():
            features = compiled(X)
        model.requires_grad_(False)
        for given in (features, compiled(X)):
            head.zero_grad()
            head(given).sum().backward()
            assert head.weight.grad is not None


class _Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x, self.inner(x), torch.complex(self.inner(x), z).conj(), (x > 0)


def test_only_what_depends_on_parameters_wants_gradients() -> None:
    x, z = torch.randn(2, 4, 16)
    model = _Both()
    with gascompile.compile(model, "1MiB") as compiled:
        same, *others = compiled(x, z)
        assert same is x and not x.requires_grad
        for found, wanted in zip(others, model(x, z)[1:], strict=True):
            assert found.requires_grad == wanted.requires_grad
            assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda it: it.to(torch.bfloat16), "bfloat16"),
        (lambda it: it.to("meta"), "'meta' is asked for"),
        (lambda it: it.cuda(), "machine="),
        (lambda it: it.to_empty(device="cpu"), "before gascompile.compile"),
        (lambda it: it.share_memory(), "before gascompile.compile"),
        (lambda it: it.to(memory_format=torch.channels_last), "before gascompile.compile"),
        (lambda it: nn.Sequential(it).to_empty(device="cpu"), "before gascompile.compile"),
        (lambda it: it.compile(), "no graph"),
        (copy.deepcopy, "a second time"),
        (copy.copy, "a second time"),
        (pickle.dumps, "pickled"),
        (lambda it: it.load_state_dict({}), "Load them into the model"),
        (lambda it: it.register_full_backward_hook(print), "no gradients"),
    ],
)
def test_what_its_plan_rules_out_is_refused(
    compiled: Any, ask: Callable[[Any], object], why: str
) -> None:
    with pytest.raises(CompiledModelError, match=why):
        ask(compiled)


def test_hooks_of_its_own_run(compiled: Any) -> None:
    handle = compiled.register_forward_hook(lambda _module, _args, output: output + 1)
    with_hook = compiled(X)
    handle.remove()
    assert torch.equal(with_hook, compiled(X) + 1)


@pytest.mark.parametrize(
    "lead",
    [
        lambda it: it.forward,
        partial,
        lambda it: lambda *args, **kwargs: it(*args, **kwargs),  # noqa: PLW0108 - as people write it
    ],
)
def test_a_model_whose_calls_are_led_to_it(
    model: Small, compiled: Any, lead: Callable[[Any], Any]
) -> None:
    wanted = eager(model, X)
    model.forward = lead(compiled)  # type: ignore[method-assign]
    assert torch.equal(model(X), wanted)
    assert torch.equal(model(X[:2]), wanted[:2])
    # Another forward is another model.
    setattr(model, "forward", lambda x: x + 1)  # noqa: B010 - mypy knows methods
    assert torch.equal(compiled(X), X + 1)


def test_a_way_back_that_is_not_seen_ends_in_an_error(model: Small, compiled: Any) -> None:
    setattr(model.norm, "forward", lambda x: compiled(x))  # noqa: B010, PLW0108 - as above
    with pytest.raises(gascompile.CaptureError, match="calls it while that is captured"):
        compiled(X)


def test_names_that_clash_are_its_own(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Clashing(Small):
        def __init__(self) -> None:
            super().__init__()
            self.plan = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
            return torch.as_tensor(self.plan(x))

    model = Clashing().eval()
    compiled: Any = gascompile.compile(model, "1MiB", machine="cpu-nvme", cache_dir=cache)
    assert torch.equal(compiled(X), eager(model, X))
    assert isinstance(compiled.plan, gascompile.Plan)
    assert not isinstance(compiled, Clashing)
    assert "'plan' of its own" in caplog.text
    with pytest.raises(AttributeError, match="'twice': call it on the model"):
        compiled.twice(X)


def test_torch_compile_leaves_it_alone(model: Small, compiled: Any) -> None:
    whole = torch.compile(nn.Sequential(nn.ReLU(), compiled, nn.Tanh()), backend="eager")
    assert torch.equal(eager(whole, X), eager(nn.Sequential(nn.ReLU(), model, nn.Tanh()), X))


def test_a_bundle_is_a_module_too(model: Small, compiled: Any, tmp_path: Path) -> None:
    wanted = compiled(X)
    compiled.save(tmp_path / "bundle")
    loaded = gascompile.load(tmp_path / "bundle", any_machine=True)
    found = loaded.state_dict()
    values = model.state_dict()
    assert all(torch.equal(found[name], values[name]) for name in found)
    assert found.keys() >= dict(model.named_parameters()).keys()
    assert torch.equal(eager(nn.Sequential(loaded.eval(), nn.Identity()), X), wanted)
    with pytest.raises(CompiledModelError, match="as it was captured"):
        loaded.train()


def test_a_model_of_transformers(cache: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        vocab_size=30, dtype="float32",
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    ids = torch.arange(8).reshape(2, 4)
    batch = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    wanted = eager(model, **batch).logits
    for given in (model, tmp_path / "model"):
        compiled: Any = gascompile.compile(given, "1MiB", machine="cpu-nvme", cache_dir=cache)
        assert torch.equal(compiled(**batch).logits, wanted)
        assert compiled.config.hidden_size == 16
        state, values = compiled.state_dict(), model.state_dict()
        assert all(torch.equal(state[name], values[name]) for name in values)
        compiled.save_pretrained(tmp_path / "again")
        again = BertForSequenceClassification.from_pretrained(tmp_path / "again").eval()
        assert torch.equal(eager(again, **batch).logits, wanted)
        compiled.close()


def test_what_tokenizers_return_is_a_dict(cache: Path) -> None:
    class Named(nn.Module):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return batch["x"] + batch["y"]

    compiled = gascompile.compile(Named(), "1MiB", machine="cpu-nvme", cache_dir=cache)
    batch = {"x": X, "y": X}
    assert torch.equal(compiled(BatchEncoding(batch)), X + X)
    assert torch.equal(compiled(batch=BatchEncoding(batch)), X + X)
    assert len(compiled._gascompile.units) == 1


def test_a_factory_that_no_plan_can_name_is_named(cache: Path) -> None:
    class OfDict(nn.Module):
        def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
            return given["a"] + 1

    compiled = gascompile.compile(OfDict(), "1MiB", machine="cpu-nvme", cache_dir=cache)
    values = {"a": torch.ones(3)}
    assert torch.equal(compiled(defaultdict(list, values)), torch.full((3,), 2.0))
    with pytest.raises(GASCompileError, match=r"lambda.*pass a dict"):
        compiled(defaultdict(lambda: 0, values))
