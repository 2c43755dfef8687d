"""States on a device: mutated there as eager mutates the model's own, counted, shared, saved and given back."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import gascompile
from gascompile.integrations.generation import Generator
from tests.greedy import eager_tokens

MACHINE = "emulated"


class Counting(nn.Module):
    """BatchNorm that learns its statistics, a counter, and a buffer of recent means."""

    calls: torch.Tensor
    recent: torch.Tensor
    step: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("recent", torch.zeros(4))
        self.register_buffer("step", torch.full((1,), 0.5).expand(4), persistent=False)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = functional.relu(self.norm(self.first(image)))
        self.recent.copy_(torch.cat([self.recent[1:], x.mean()[None]]))
        x = self.second(x)
        result: torch.Tensor = x * self.calls + self.recent.sum() + self.step.sum()
        return result


def images(seed: int, rows: int = 2) -> torch.Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def model() -> Counting:
    return Counting().train()


def smallest(model: nn.Module, cache: Path) -> int:
    with pytest.raises(gascompile.InfeasiblePlanError) as error:
        gascompile.compile(model, 0, (images(0),), machine=MACHINE, cache_dir=cache)
    return error.value.required_bytes


def check(compiled: gascompile.CompiledModel, eager: Counting, seed: int, rows: int = 2) -> None:
    with torch.no_grad():
        wanted = eager(images(seed, rows))
    torch.testing.assert_close(compiled(images(seed, rows)), wanted, rtol=0, atol=1e-5)


def assert_states(found: Any, eager: Counting) -> None:
    buffers = {name: value for name, value in eager.named_buffers() if name in found}
    assert {"calls", "recent", "norm.running_mean", "norm.running_var"} <= buffers.keys()
    for name, wanted in buffers.items():
        torch.testing.assert_close(found[name], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_small", [True, False])
def test_states_follow_eager(model: Counting, cache: Path, is_small: bool) -> None:
    eager = copy.deepcopy(model)
    budget = smallest(model, cache) if is_small else None
    with gascompile.compile(
        model, budget, (images(0),), machine=MACHINE, cache_dir=cache
    ) as compiled:
        for seed in range(3):
            check(compiled, eager, seed)
            assert model.calls == seed + 1
            assert_states(dict(model.named_buffers()), eager)
            report = compiled.last_run
            assert report is not None
            if budget is not None:
                assert report.peak_bytes["gpu"] <= budget
        session = compiled._gascompile.session
        assert session is not None
        assert session.kept.tensors["calls"] == 3
        assert session.kept.tensors["calls"].data_ptr() != model.calls.data_ptr()
        assert session.kept.size_bytes >= model.recent.nbytes + model.calls.nbytes
        assert_states(compiled.states, eager)
        # What the caller writes is what the next call reads.
        compiled.states["calls"].fill_(10)
        eager.calls.fill_(10)
        for own in (model.norm.running_mean, eager.norm.running_mean):
            assert own is not None
            own.zero_()
        check(compiled, eager, 4)
        assert_states(compiled.states, eager)
        check(compiled, eager, 5)
    assert_states(dict(model.named_buffers()), eager)
    check(compiled, eager, 6)
    compiled.close()
    assert_states(dict(model.named_buffers()), eager)


def test_the_model_is_at_any_time_what_eager_would_have_made_of_it(
    model: Counting, cache: Path
) -> None:
    eager = copy.deepcopy(model)
    with gascompile.compile(model, None, machine=MACHINE, cache_dir=cache) as compiled:
        for seed in range(3):
            check(compiled, eager, seed)
        assert compiled.calls == model.calls == 3
        for found in (model.state_dict(), compiled.state_dict(), dict(model.named_buffers())):
            assert_states(found, eager)
        assert_states(dict(copy.deepcopy(model).named_buffers()), eager)
        # What is made of the value that is seen is what goes on.
        for own in (model, eager):
            own.calls.add_(100)
            assert own.norm.running_mean is not None
            own.norm.running_mean.mul_(2.0)
        check(compiled, eager, 3)
        # The model itself changes them, too, between two calls of what was compiled.
        with torch.no_grad():
            assert torch.allclose(model(images(4)), eager(images(4)), rtol=0, atol=1e-5)
        check(compiled, eager, 5)
        assert_states(dict(model.named_buffers()), eager)
        for own in (model, eager):
            own.eval()
        check(compiled, eager, 6)
        assert_states(dict(model.named_buffers()), eager)


def test_states_stay_where_they_are_and_go_to_the_device_no_more(
    model: Counting, cache: Path
) -> None:
    with gascompile.compile(model, None, machine=MACHINE, cache_dir=cache) as compiled:
        compiled(images(0))
        session, step = compiled._gascompile.session, model.step._version
        assert session is not None
        kept, own = session.kept, dict(model.named_buffers())
        places = [t.data_ptr() for t in (*own.values(), *kept.tensors.values())]
        for seed in range(1, 4):
            compiled(images(seed))
        assert dict(model.named_buffers()) == own
        assert [t.data_ptr() for t in (*own.values(), *kept.tensors.values())] == places
        assert model.step._version == step, "nobody writes to a constant"
        kept.tensors["calls"].fill_(50)
        kept.push()
        assert kept.tensors["calls"] == 50, "a copy that came from there was taken for the caller's"


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    # What it has compiled keeps its threads until then.
    torch._dynamo.reset()
    gc.collect()


@pytest.mark.usefixtures("dynamo")
def test_states_of_a_graph_of_dynamo_follow_eager(model: Counting, cache: Path) -> None:
    eager = copy.deepcopy(model)
    options: dict[str, Any] = {"machine": MACHINE, "cache_dir": str(cache)}
    traced = torch.compile(model, backend="gascompile", options=options)
    with torch.no_grad():
        for seed in range(3):
            wanted = eager(images(seed))
            torch.testing.assert_close(traced(images(seed)), wanted, rtol=0, atol=1e-5)
            assert_states(dict(model.named_buffers()), eager)
            for own in (model, eager):
                own.calls.add_(100)


class Picking(nn.Module):
    """Counts its calls before it picks a row, which may not be there."""

    calls: torch.Tensor
    picked: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("picked", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.linear(x).index_select(0, row) * self.calls
        self.picked += 1
        return result


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_states_of_a_run_that_ends_early(
    cache: Path, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    model = Picking().eval()
    eager, x, row = copy.deepcopy(model), torch.randn(4, 8), torch.tensor([1])
    with torch.no_grad(), gascompile.compile(model, machine=MACHINE, cache_dir=cache) as compiled:
        assert torch.allclose(compiled(x, row), eager(x, row))
        session = compiled._gascompile.session
        assert session is not None
        with monkeypatch.context() as patch:
            if is_interrupted:
                patch.setattr(session._files, "recheck", interrupt)
            with pytest.raises(KeyboardInterrupt if is_interrupted else (IndexError, RuntimeError)):
                compiled(x, row if is_interrupted else torch.tensor([9]))
        with pytest.raises(IndexError):
            eager(x, torch.tensor([9]))
        eager.picked += int(is_interrupted)
        assert (model.calls, model.picked) == (eager.calls, eager.picked)
        assert torch.allclose(compiled(x, row), eager(x, row))
        assert (model.calls, model.picked) == (eager.calls, eager.picked)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_states_are_saved_as_they_are(model: Counting, cache: Path, tmp_path: Path) -> None:
    eager = copy.deepcopy(model)
    with gascompile.compile(
        model, None, (images(0),), machine=MACHINE, cache_dir=cache
    ) as compiled:
        check(compiled, eager, 0)
        compiled.save(tmp_path / "bundle")
        with gascompile.load(tmp_path / "bundle") as loaded:
            assert_states(loaded.states, eager)
            check(compiled, copy.deepcopy(eager), 1)
            for seed in (1, 2):
                check(loaded, eager, seed)
            assert_states(loaded.states, eager)


def test_signatures_share_states(model: Counting, cache: Path) -> None:
    eager = copy.deepcopy(model)
    with gascompile.compile(model, machine=MACHINE, cache_dir=cache) as compiled:
        for seed, rows in enumerate((2, 3, 2, 2, 3)):
            check(compiled, eager, seed, rows)
        assert_states(compiled.states, eager)


def test_states_of_a_dropped_model_are_given_back(model: Counting, cache: Path) -> None:
    eager = copy.deepcopy(model)
    compiled = gascompile.compile(model, None, (images(0),), machine=MACHINE, cache_dir=cache)
    check(compiled, eager, 0)
    del compiled
    gc.collect()
    assert_states(dict(model.named_buffers()), eager)


# ---------------------------------------------------------------- generation


@pytest.fixture(scope="module")
def lm() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name:
                parameter.mul_(8.0)
    return model.eval()


def generators(lm: Any, cache: Path) -> Iterator[tuple[Generator, int]]:
    options: dict[str, Any] = {
        "max_length": 40,
        "prefill_tokens": 8,
        "machine": MACHINE,
        "cache_dir": cache,
    }
    with pytest.raises(gascompile.InfeasiblePlanError) as error:
        Generator(lm, 1, **options)
    for budget in (error.value.required_bytes, 64 << 20):
        with Generator(lm, budget, **options) as generator:
            yield generator, budget


def test_a_cache_on_the_device_answers_as_eager_does(lm: Any, cache: Path) -> None:
    prompt = torch.arange(7, 19)
    expected = eager_tokens(lm, prompt, 12)
    assert len(set(expected)) > 3, "the answer is too dull to tell a mistake"
    plans = []
    for generator, budget in generators(lm, cache):
        assert list(generator.stream(prompt, 12)) == expected
        assert generator._open is not None
        session = generator._open[0]
        assert session.kept.size_bytes >= generator.cache_bytes
        for report in generator.last_runs.values():
            assert generator.cache_bytes < report.peak_bytes["gpu"] <= budget
        # The cache outlives its session: only what is new is read.
        generator.close()
        longer = torch.cat([prompt, torch.tensor(expected)])
        generator.last_runs.clear()
        assert list(generator.stream(longer, 3)) == eager_tokens(lm, longer, 3)
        assert set(generator.last_runs) == {"decode"}
        generator.reset()
        assert list(generator.stream(prompt.flip(0), 4)) == eager_tokens(lm, prompt.flip(0), 4)
        plans.append(set(generator.plans))
    assert plans[-1] == {"decode", "prefill"}
