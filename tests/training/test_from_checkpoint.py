"""Steps whose values come from a checkpoint: as if the model had been loaded, and it never stands whole in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from gascompile import TrainingStep, compile_step
from gascompile.core.errors import CheckpointError, InfeasiblePlanError, UnsupportedOpError
from gascompile.training.planning.step_plan import step_plan
from gascompile.training.state import giving_back
from tests.training.runs import (
    BUDGET_BYTES,
    MACHINE,
    PLANNING_S,
    TinyGPT,
    adamw,
    batches,
    loss_fn,
    new_model,
)

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the page memory is compiled once."""
    return tmp_path_factory.mktemp("cache")


def saved(model: nn.Module, path: Path, change: Callable[[Tensors], object] | None = None) -> Path:
    """Write a model as safetensors, tied weights under their first name, and return the file."""
    seen: set[int] = set()
    tensors: Tensors = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
        seen.add(id(value))
    if change is not None:
        change(tensors)
    save_file(tensors, path)
    return path


def outline(build: Callable[[], nn.Module] = TinyGPT) -> nn.Module:
    """Return a model without values."""
    with torch.device("meta"):
        return build()


def opened(
    model: nn.Module,
    path: Path | None,
    cache: Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    budget: int = BUDGET_BYTES,
) -> TrainingStep:
    return compile_step(
        model,
        loss_fn,
        optimizer or adamw(model),
        budget,
        batches(1)[0],
        checkpoint=path,
        machine=MACHINE,
        cache_dir=cache,
        time_limit_s=PLANNING_S,
    )


def trained(step: TrainingStep, count: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [step(batch) for batch in batches(count)]


def test_trains_as_the_loaded_model_does(tmp_path: Path, cache: Path) -> None:
    model = new_model().train()
    path = saved(model, tmp_path / "model.safetensors")
    with opened(model, None, cache) as plain:
        losses = trained(plain)
    meta = outline().train()
    tied = meta.get_parameter("embedding.weight")
    optimizer = adamw(meta)
    with opened(meta, path, cache, optimizer=optimizer) as step:
        assert [x.item() for x in trained(step)] == [x.item() for x in losses]
        assert step.num_steps == 3
        found = step.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(found["model"][name], value), name
        # Closing has put the values into the tensors that the model and the optimizer have had all along.
        assert torch.equal(meta.state_dict()[name], value), name
    assert meta.get_parameter("head.weight") is tied is meta.get_parameter("embedding.weight")
    assert optimizer.state[tied]["step"] == 3
    assert optimizer.param_groups[0]["params"][0] is tied


def test_a_tied_weight_may_stand_under_its_other_name(tmp_path: Path, cache: Path) -> None:
    model = new_model().train()

    def under_the_other_name(tensors: Tensors) -> None:
        tensors["head.weight"] = tensors.pop("embedding.weight")

    path = saved(model, tmp_path / "model.safetensors", under_the_other_name)
    with opened(outline().train(), path, cache) as step:
        assert torch.equal(step.state_dict()["model"]["embedding.weight"], model.head.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_smaller_floats_are_converted(tmp_path: Path, cache: Path, dtype: torch.dtype) -> None:
    def rounded(tensors: Tensors) -> None:
        tensors |= {n: t.to(dtype) for n, t in tensors.items() if t.is_floating_point()}

    path = saved(new_model(), tmp_path / "model.safetensors", rounded)
    with opened(outline().train(), path, cache) as step:
        found = step.state_dict()["model"]
    for name, value in load_file(path).items():
        assert torch.equal(found[name], value.to(found[name].dtype)), name
        assert found[name].dtype != dtype


def test_larger_floats_are_refused(tmp_path: Path, cache: Path) -> None:
    def doubled(tensors: Tensors) -> None:
        tensors["blocks.0.up.weight"] = tensors["blocks.0.up.weight"].double()

    path = saved(new_model(), tmp_path / "model.safetensors", doubled)
    with pytest.raises(CheckpointError, match=r"'blocks\.0\.up\.weight' has the dtype float64"):
        opened(outline(), path, cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blocks.0.up.bias"), r"lacks 1 weights .* 'blocks\.0\.up\.bias'"),
        (lambda t: t.update(more=torch.zeros(1)), "holds 1 weights .* 'more'"),
        (lambda t: t.update({"norm.bias": torch.zeros(3)}), r"'norm\.bias' has the shape \[3\]"),
        (lambda t: t.pop("norm.running_mean"), r"lacks 1 weights .* 'norm\.running_mean'"),
    ],
)
def test_checkpoints_of_other_models_are_refused(
    tmp_path: Path, cache: Path, change: Callable[[Tensors], object], message: str
) -> None:
    path = saved(new_model(), tmp_path / "model.safetensors", change)
    model = outline()
    with pytest.raises(CheckpointError, match=message):
        opened(model, path, cache)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_refused_budget_leaves_the_model_without_values(tmp_path: Path, cache: Path) -> None:
    path = saved(new_model(), tmp_path / "model.safetensors")
    model = outline()
    with pytest.raises(InfeasiblePlanError):
        opened(model, path, cache, budget=BUDGET_BYTES // 2)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    with opened(model, path, cache) as step:
        assert trained(step, 1)[0].isfinite()


class Rotating(nn.Module):
    """A table that no state dict has, a parameter that no loss reads, and one in another order of memory."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.weight = nn.Parameter(torch.ones(8, 4))
        self.unread = nn.Parameter(torch.full((6,), 3.0))
        self.kernel = nn.Parameter(
            torch.arange(4.0 * 3 * 3 * 3).reshape(4, 3, 3, 3).to(memory_format=torch.channels_last)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = (x @ (self.weight * self.table.unsqueeze(1))).sum()
        image = x.new_ones(1, 3, 3, 3).to(memory_format=torch.channels_last)
        return scaled + functional.conv2d(image, self.kernel).sum()


def rotate(model: nn.Module, path: Path | None, cache: Path, budget: str = "6MiB") -> TrainingStep:
    return compile_step(
        model,
        lambda model, x: model(x),
        torch.optim.SGD(model.parameters(), lr=0.1),
        budget,
        torch.ones(2, 8),
        checkpoint=path,
        machine=MACHINE,
        cache_dir=cache,
    )


def test_a_buffer_that_has_no_value_anywhere_is_named(tmp_path: Path, cache: Path) -> None:
    path = saved(Rotating(), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="'table' is on the meta device and not part of"):
        rotate(outline(Rotating), path, cache)
    model = outline(Rotating)
    model.register_buffer("table", torch.arange(8.0), persistent=False)
    with rotate(model, path, cache) as step:
        # Each column of ones times the table is 28, and the kernel's elements are 0 to 107.
        assert float(step(torch.ones(2, 8))) == 2 * 4 * 28 + sum(range(108))
        assert torch.equal(step.state_dict()["model"]["unread"], torch.full((6,), 3.0))
        kernel = step.state_dict()["model"]["kernel"]
        assert torch.equal(kernel, Rotating().kernel - 0.1)
        assert kernel.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.get_parameter("unread"), torch.full((6,), 3.0))


def test_values_in_memory_give_way_to_those_of_the_checkpoint(tmp_path: Path, cache: Path) -> None:
    path = saved(new_model(1), tmp_path / "model.safetensors")
    with opened(new_model(2), path, cache) as step:
        found = step.state_dict()["model"]
    assert torch.equal(found["head.weight"], new_model(1).head.weight)


def test_nothing_is_read_before_a_plan(tmp_path: Path, cache: Path) -> None:
    path = saved(new_model(), tmp_path / "model.safetensors")
    model = outline().train()
    step = compile_step(
        model,
        loss_fn,
        adamw(model),
        BUDGET_BYTES,
        checkpoint=path,
        machine=MACHINE,
        cache_dir=cache,
    )
    with pytest.raises(ValueError, match="nothing is planned"):
        step.state_dict()
    with pytest.raises(ValueError, match="nothing is planned"):
        step.load_state_dict({"model": {}, "optimizer": {}})
    step.close()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_shared_memory_is_refused(tmp_path: Path, cache: Path) -> None:
    path = saved(new_model(), tmp_path / "model.safetensors")
    model = new_model()
    model.blocks[0].get_submodule("up").register_buffer(
        "view", model.embedding.weight.detach()[:2], persistent=False
    )
    with pytest.raises(UnsupportedOpError, match="share memory"):
        opened(model, path, cache)


def test_a_model_without_room_stays_out_and_a_checkpoint_keeps_it(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(new_model(), tmp_path / "model.safetensors")
    model = outline().train()
    step = opened(model, path, cache)
    trained(step)
    found = step.state_dict()["model"]
    step.save(tmp_path / "checkpoints")
    monkeypatch.setattr(giving_back, "available_bytes", lambda: -1)
    with pytest.warns(UserWarning, match="stays on the meta device"):
        step.close()
    assert all(parameter.is_meta for parameter in model.parameters())
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    assert shapes == {name: value.shape for name, value in found.items()}
    monkeypatch.undo()
    with opened(model, path, cache) as again:
        again.load(tmp_path / "checkpoints")
        assert again.num_steps == 3
        for name, value in again.state_dict()["model"].items():
            assert torch.equal(value, found[name]), name


def test_a_file_that_has_become_shorter_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(new_model(), tmp_path / "model.safetensors")

    def cut(*args: object, **kwargs: object) -> object:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        return step_plan(*args, **kwargs)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr("gascompile.training.planning.step_plan.step_plan", cut)
    model = outline().train()
    with pytest.raises(CheckpointError, match="has changed since"):
        opened(model, path, tmp_path / "cache")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_huggingface_models_get_their_tables_back(tmp_path: Path, cache: Path) -> None:
    """Rotary frequencies are in no checkpoint; the model's own code makes them from its configuration."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        use_cache=False,
    )
    torch.manual_seed(0)
    loaded = transformers.LlamaForCausalLM(config).train()
    loaded.save_pretrained(tmp_path / "model")
    tokens = torch.randint(0, 64, (2, 8))
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()

    def next_tokens(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
    with compile_step(
        model,
        next_tokens,
        torch.optim.AdamW(model.parameters(), fused=True),
        "6MiB",
        tokens,
        checkpoint=tmp_path / "model",
        machine=MACHINE,
        cache_dir=cache,
    ) as step:
        expected = next_tokens(loaded, tokens)
        assert step(tokens).item() == pytest.approx(expected.item(), rel=1e-6)


CHILD = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional
from benchmarks.anonymous import PeakSampler, anonymous_bytes
from gascompile import compile_step
from tests.training.runs import MACHINE

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(40))

    def forward(self, x):
        for layer in self.layers:
            x = functional.relu(layer(x)) + x
        return x.square().mean()

path, cache = map(Path, sys.argv[1:])
with torch.device("meta"):
    model = Wide()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
x = torch.ones(2, 1024)
# What libraries take when they are first used.
small = nn.Linear(4, 4)
compile_step(small, lambda m, x: m(x).sum(), torch.optim.AdamW(small.parameters()), "8MiB", torch.ones(2, 4),
             machine=MACHINE, cache_dir=cache)(torch.ones(2, 4))
before = anonymous_bytes()
with PeakSampler() as sampler:
    step = compile_step(model, lambda model, x: model(x), optimizer, "40MiB", x, checkpoint=path,
                        machine=MACHINE, cache_dir=cache, time_limit_s=2)
    losses = [float(step(x)) for _ in range(2)]
    peak = sampler.take_peak_bytes()
print(json.dumps([losses, peak - before]))
"""


def test_a_process_never_holds_the_model(tmp_path: Path, cache: Path) -> None:
    """The parameters alone are four times the budget, with moments twelve times."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for number in range(40):
        weight = torch.randn(1024, 1024, generator=generator) / 64
        tensors[f"layers.{number}.weight"] = weight
        tensors[f"layers.{number}.bias"] = torch.zeros(1024)
    path = tmp_path / "wide.safetensors"
    save_file(tensors, path)
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(path), str(cache)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses, peak_bytes = json.loads(done.stdout.splitlines()[-1])
    x = torch.ones(2, 1024)
    for number in range(40):
        x = functional.relu(x @ tensors[f"layers.{number}.weight"].T) + x
    assert losses[0] == pytest.approx(x.square().mean().item(), rel=1e-5)
    assert losses[1] < losses[0]
    # 160 MiB would be the model; what a trace and a plan take in Python comes on top of the budget.
    assert peak_bytes < (40 << 20) + (48 << 20)
