"""The models that ranks train, with their losses and batches, which depend on the step's number alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Sizes = dict[str, int]
Loss = Callable[[nn.Module, Any], torch.Tensor]
LANGUAGE: dict[str, Sizes] = {
    "toy": {"layers": 2, "width": 64, "heads": 2, "vocab": 256, "tokens": 16},
    "small": {"layers": 2, "width": 128, "heads": 4, "vocab": 1024, "tokens": 32},
    "middle": {"layers": 6, "width": 384, "heads": 6, "vocab": 4096, "tokens": 128},
    "full": {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "tokens": 256},
}
"""``middle`` has 12 M parameters as a GPT-2, ``full`` is GPT-2 small."""
CONVOLUTIONS: dict[str, Sizes] = {
    "toy": {"channels": 8, "pixels": 16},
    "small": {"channels": 32, "pixels": 32},
    "middle": {"channels": 64, "pixels": 64},
}
_CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model to train."""

    build: Callable[[], nn.Module]
    loss: Loss
    batch: Callable[[int, int], Any]
    """Of a step's number and how many rows all ranks have; tensors begin with the rows."""

    def model(self) -> nn.Module:
        """Return the model with the weights that training begins with."""
        torch.manual_seed(0)
        return self.build().train()


def case_of(name: str, size: str, tokens: int | None = None) -> Case:
    """Return a model by name: ``gpt``, ``gpt2``, ``gpt2-dropout``, ``llama``, ``mixtral`` or ``convnet``."""
    if name == "convnet":
        return _convnet(CONVOLUTIONS[size])
    sizes = dict(LANGUAGE[size])
    if tokens is not None:
        sizes["tokens"] = tokens
    if name == "gpt":
        from examples.small_gpt import NUM_BYTES

        sizes["vocab"] = NUM_BYTES
    named: dict[str, tuple[Callable[[Sizes], nn.Module], Loss]] = {
        "gpt": (_small_gpt, _next_token),
        "gpt2": (_gpt2, _masked),
        "gpt2-dropout": (partial(_gpt2, dropout=0.1), _masked),
        "llama": (_llama, _unmasked),
        "mixtral": (_mixtral, _unmasked),
    }
    build, loss = named[name]

    def batch(number: int, rows: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(1000 + number)
        return torch.randint(0, sizes["vocab"], (rows, sizes["tokens"]), generator=random)

    return Case(build=lambda: build(sizes), loss=loss, batch=batch)


def cut(batch: Any, rows: list[int], rank: int) -> Any:
    """Return a rank's rows of a batch."""
    begin, end = sum(rows[:rank]), sum(rows[: rank + 1])
    if isinstance(batch, torch.Tensor):
        return batch[begin:end]
    return tuple(tensor[begin:end] for tensor in batch)


def _cross_entropy(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _next_token(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return _cross_entropy(model(ids), ids)


def _masked(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    # Without a mask of four dimensions this model looks into values of positions.
    tokens = ids.shape[1]
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    return _cross_entropy(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, ids)


def _unmasked(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return _cross_entropy(model(input_ids=ids, use_cache=False).logits, ids)


def _small_gpt(sizes: Sizes) -> nn.Module:
    from examples.small_gpt import SmallGPT

    given = {name: sizes[name] for name in ("layers", "width", "heads", "tokens")}
    return SmallGPT(**given)


def _gpt2(sizes: Sizes, *, dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=sizes["layers"],
        n_embd=sizes["width"],
        n_head=sizes["heads"],
        vocab_size=sizes["vocab"],
        n_positions=sizes["tokens"],
        bos_token_id=sizes["vocab"] - 1,
        eos_token_id=sizes["vocab"] - 1,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def _llama_sizes(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes["width"],
        "intermediate_size": 3 * sizes["width"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": max(sizes["heads"] // 2, 1),
        "vocab_size": sizes["vocab"],
        "use_cache": False,
        "bos_token_id": sizes["vocab"] - 1,
        "eos_token_id": sizes["vocab"] - 1,
    }


def _llama(sizes: Sizes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_llama_sizes(sizes)))


def _mixtral(sizes: Sizes) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_llama_sizes(sizes), num_local_experts=4, num_experts_per_tok=2)
    # One product over gathered experts: a loop over those that were hit depends on values.
    config._experts_implementation = "batched_mm"
    return MixtralForCausalLM(config)


def _convnet(sizes: Sizes) -> Case:
    channels, pixels = sizes["channels"], sizes["pixels"]

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in (
            (3, channels),
            (channels, 2 * channels),
            (2 * channels, 4 * channels),
        ):
            layers += [
                nn.Conv2d(before, after, 3, stride=2, padding=1),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        return nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * channels, _CLASSES)
        )

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def batch(number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(1000 + number)
        images = torch.randn(rows, 3, pixels, pixels, generator=random)
        return images, torch.randint(0, _CLASSES, (rows,), generator=random)

    return Case(build=build, loss=loss, batch=batch)
