"""Adapters over a base model that stays in its checkpoint: trained as in eager, and nothing of the base is copied."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gascompile
from gascompile.core.errors import BudgetExceededError, CheckpointError
from gascompile.core.sizes import PAGE_BYTES, align_up
from gascompile.integrations.adapter_names import with_base_names
from gascompile.weights.checkpoint import has_own_values, open_checkpoint
from tests.training.adapted import MASK, by_peft, filled, next_tokens, token_batches
from tests.training.runs import MACHINE, PLANNING_S, adamw

Wrap = Callable[[nn.Module], nn.Module]

BUDGET_BYTES = (4 << 20) + 700_000
"""Four MiB of transfer buffers, and less than the base."""
RATES = (*MACHINE.rates, dataclasses.replace(MACHINE.rates[0], dtype="bfloat16"))
HOST = dataclasses.replace(MACHINE, name="by hand, in two dtypes", rates=RATES)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the page memory is compiled once."""
    return tmp_path_factory.mktemp("cache")


class Lora(nn.Module):
    """A linear layer with an adapter, under the names that peft gives."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.lora_B["default"](self.lora_A["default"](x.float()))
        found: torch.Tensor = self.base_layer(x) + low.to(x.dtype)
        return found


def by_hand(model: nn.Module) -> nn.Module:
    """Put adapters, with values, around the queries and values of a model."""
    model.requires_grad_(False)
    for layer in [m for m in model.modules() if hasattr(m, "q_proj")]:
        for name in ("q_proj", "v_proj"):
            setattr(layer, name, Lora(layer.get_submodule(name), 4))  # type: ignore[arg-type]
    return filled(model)


def base(folder: Path, dtype: torch.dtype) -> tuple[Callable[[], nn.Module], nn.Module]:
    """Save a small llama; return what builds it on the meta device, and itself."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    loaded: nn.Module = transformers.LlamaForCausalLM(config).to(dtype)
    loaded.save_pretrained(folder)  # type: ignore[operator]  # of a class without types

    def outline() -> nn.Module:
        with torch.device("meta"):
            found: nn.Module = transformers.LlamaForCausalLM(config).to(dtype)
        return found

    return outline, loaded


TOKENS = token_batches(256)


@pytest.mark.parametrize(("dtype", "wrap"), [(torch.float32, by_hand), (torch.bfloat16, by_peft)])
def test_a_base_on_the_meta_device_is_never_copied(
    tmp_path: Path, cache: Path, dtype: torch.dtype, wrap: Wrap
) -> None:
    outline, loaded = base(tmp_path / "base", dtype)
    eager, model = wrap(loaded), wrap(outline())
    optimizer = adamw(eager)
    losses = []
    for tokens in TOKENS * 2:
        optimizer.zero_grad()
        loss = next_tokens(eager, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    _take_what_they_take(lambda: wrap(outline()), tmp_path / "base", cache)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    trained = [p.nbytes for p in model.parameters() if p.requires_grad]
    assert frozen > BUDGET_BYTES - (4 << 20) > sum(trained)
    with gascompile.compile_step(
        model,
        next_tokens,
        adamw(model),
        BUDGET_BYTES,
        TOKENS[0],
        checkpoint=tmp_path / "base",
        machine=HOST,
        cache_dir=cache,
        time_limit_s=PLANNING_S,
    ) as step:
        places = step.state_places()
        file = next(place[0] for name, place in places.items() if "lora" in name)
        # Adapters with their moments, and the tables that the library's code makes again.
        tables = [buffer.nbytes for buffer in model.buffers()]
        own = sum(align_up(n, PAGE_BYTES) for n in [*trained * 3, *tables])
        assert os.fstat(file).st_size == own
        assert [step(tokens).item() for tokens in TOKENS * 2] == losses
        assert os.fstat(file).st_size == own
        assert step.last_run is not None
        assert step.last_run.peak_source == "allocator"
        assert step.last_run.peak_bytes["cpu"] <= BUDGET_BYTES
        # The base does not fit, and is read at every step.
        assert step.last_run.link_bytes["nvme->cpu"] > frozen // 4
    for name, value in eager.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def _take_what_they_take(build: Callable[[], nn.Module], checkpoint: Path, cache: Path) -> None:
    """Have plans know what ops take beside their operands, of which a machine by hand says nothing.

    Products in bfloat16 take 40 kB on processors with tiles; where a parameter has changed by then, the step that shows
    it is not tried again.
    """
    for _ in range(8):
        model = build()
        with (
            contextlib.suppress(BudgetExceededError),
            gascompile.compile_step(
                model,
                next_tokens,
                adamw(model),
                BUDGET_BYTES,
                TOKENS[0],
                checkpoint=checkpoint,
                machine=HOST,
                cache_dir=cache,
                time_limit_s=PLANNING_S,
            ) as step,
        ):
            for tokens in TOKENS:
                step(tokens)
            return


@pytest.mark.parametrize("wrap", [by_hand, by_peft])
def test_inference_takes_the_base_from_its_files_and_adapters_from_memory(
    tmp_path: Path, wrap: Wrap
) -> None:
    outline, loaded = base(tmp_path / "base", torch.float32)
    model = wrap(outline()).eval()
    compiled = gascompile.compile(
        model,
        BUDGET_BYTES,
        (TOKENS[0], MASK),
        checkpoint=tmp_path / "base",
        machine=HOST,
        cache_dir=tmp_path / "cache",
    )
    expected = wrap(loaded).eval()(TOKENS[0], MASK).logits
    assert torch.equal(compiled(TOKENS[0], MASK).logits, expected)


def in_memory(model: nn.Module, **names: nn.Module) -> nn.Module:
    for name, module in names.items():
        model.add_module(name, module)
    return model


def test_adapters_without_values_are_named(tmp_path: Path) -> None:
    save_file(
        {"layer.weight": torch.ones(3, 2), "layer.bias": torch.ones(3)},
        tmp_path / "base.safetensors",
    )
    checkpoint = open_checkpoint(tmp_path / "base.safetensors")
    with torch.device("meta"):
        model = in_memory(nn.Module(), layer=Lora(nn.Linear(2, 3), 1))
    with pytest.raises(CheckpointError, match=r"adapter's 'layer\.lora_A\.default\.weight' is on"):
        with_base_names(model, checkpoint)
    model.get_submodule("layer.lora_A").to_empty(device="cpu")
    model.get_submodule("layer.lora_B").to_empty(device="cpu")
    found = with_base_names(model, checkpoint).sources
    assert sorted(found) == ["layer.base_layer.bias", "layer.base_layer.weight"]
    assert found["layer.base_layer.bias"].extents == checkpoint.sources["layer.bias"].extents
    assert has_own_values(model) == {f"layer.lora_{x}.default.weight" for x in "AB"}
    # A base without adapters, and a checkpoint of the whole, keep their names.
    plain = in_memory(nn.Module(), layer=nn.Linear(2, 3))
    assert with_base_names(plain, checkpoint).sources == checkpoint.sources
    assert has_own_values(plain) == set()
    assert with_base_names(plain, dataclasses.replace(checkpoint, sources=found)).sources == found


def test_layers_that_are_trained_whole_begin_as_the_base(tmp_path: Path) -> None:
    save_file({"head.weight": torch.ones(3, 2)}, tmp_path / "base.safetensors")
    checkpoint = open_checkpoint(tmp_path / "base.safetensors")

    def copied(device: str) -> nn.Module:
        with torch.device("meta"):
            head = in_memory(nn.Module(), original_module=nn.Linear(2, 3, bias=False))
        own = nn.Linear(2, 3, bias=False, device=device)
        return in_memory(
            nn.Module(), head=in_memory(head, modules_to_save=nn.ModuleDict({"default": own}))
        )

    both = {"head.original_module.weight", "head.modules_to_save.default.weight"}
    assert with_base_names(copied("meta"), checkpoint).sources.keys() == both
    # A copy with values was loaded with the adapter.
    found = with_base_names(copied("cpu"), checkpoint).sources
    assert found.keys() == {"head.original_module.weight"}


def test_what_a_base_lacks_is_still_missed(tmp_path: Path, cache: Path) -> None:
    save_file({"layer.weight": torch.ones(3, 2)}, tmp_path / "base.safetensors")
    with torch.device("meta"):
        layer = nn.Linear(2, 3)
    model = in_memory(nn.Sequential(), layer=filled(Lora(layer, 1)))
    for part in ("layer.lora_A", "layer.lora_B"):
        model.get_submodule(part).to_empty(device="cpu")
    with pytest.raises(CheckpointError, match=r"lacks 1 weights .* 'layer\.base_layer\.bias'"):
        gascompile.compile_step(
            model,
            lambda m, x: m(x).sum(),
            adamw(model),
            "8MiB",
            torch.ones(1, 2),
            checkpoint=tmp_path / "base.safetensors",
            machine=HOST,
            cache_dir=cache,
        )
