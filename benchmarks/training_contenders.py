"""Ways to train one model in less memory, each as a function from a case to its training step.

All of them train the same model on the same batches with the same optimizer, so their losses have to agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional

LEARNING_RATE = 1e-4
OURS = "gascompile"
_SMALL_BYTES = 64 << 10
"""Saved tensors below this stay in memory: together they are little, and each file costs a fixed time."""

SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {"batch": 4, "tokens": 256},
    "toy": {
        "batch": 2,
        "tokens": 32,
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 2,
        "vocab_size": 512,
        "n_positions": 64,
    },
}


PLANNING_S = {"gpt2": 20.0, "toy": 1.0}
"""What the search for a plan may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a contender trains, and the folder that it may fill."""

    model: nn.Module
    first_batch: torch.Tensor
    scratch: Path
    budget: str | None
    planning_s: float = PLANNING_S["gpt2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """One contender, ready to train."""

    step: Callable[[torch.Tensor], torch.Tensor]
    details: Callable[[], dict[str, Any]] = dict
    """What it has to say about the steps so far, for the result file."""
    close: Callable[[], None] = lambda: None


def build_model(shape: str) -> nn.Module:
    """Return GPT-2 with random weights, the same at each call, without dropout and in training mode."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {
        name: n for name, n in SHAPES[shape].items() if name not in {"batch", "tokens"}
    }
    if "vocab_size" in sizes:
        sizes |= dict.fromkeys(("bos_token_id", "eos_token_id"), sizes["vocab_size"] - 1)
    torch.manual_seed(0)
    config = GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False)
    model: nn.Module = GPT2LMHeadModel(config).train()
    return model


def batch_of(shape: str, step: int) -> torch.Tensor:
    """Return the token ids of a step: ``[batch, tokens]``, random, the same for every contender."""
    sizes = SHAPES[shape]
    random = torch.Generator().manual_seed(1000 + step)
    size = (sizes["batch"], sizes["tokens"])
    return torch.randint(0, sizes.get("vocab_size", 50257), size, generator=random)


def loss_fn(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of each next token."""
    # A mask of four dimensions is taken as it is; without one, transformers looks into values of positions,
    # which a graph that is captured once cannot.
    tokens = ids.shape[1]
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer that all contenders use."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def trainer_of(
    loss_of: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer
) -> Trainer:
    """Return what trains in plain PyTorch."""

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Trainer(step=step)


def eager(case: Case) -> Trainer:
    """Everything in memory, as PyTorch does it."""
    return trainer_of(lambda batch: loss_fn(case.model, batch), optimizer_of(case.model))


def checkpointed(case: Case) -> Trainer:
    """``torch.utils.checkpoint`` around each block: activations of blocks are computed again."""
    _recompute_blocks(case)
    return eager(case)


def _recompute_blocks(case: Case) -> None:
    model: Any = case.model
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})


def _compiled(case: Case, share: float) -> Trainer:
    import torch._functorch.config as functorch_config

    functorch_config.activation_memory_budget = share
    loss_of = torch.compile(lambda batch: loss_fn(case.model, batch))
    return trainer_of(loss_of, optimizer_of(case.model))


def compiled_half(case: Case) -> Trainer:
    """``torch.compile`` that may keep half of the activations' memory."""
    return _compiled(case, 0.5)


def compiled_none(case: Case) -> Trainer:
    """``torch.compile`` that keeps no activation which it can compute again."""
    return _compiled(case, 0.0)


class FileSpill:
    """Writes each saved tensor to a file when it is saved and reads it back where it is used.

    What shares storage with a parameter is not written, and neither are small tensors.
    """

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._parameters = {part.untyped_storage().data_ptr() for part in model.parameters()}
        self.written_bytes = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return a file's path with the array's type and shape, or the tensor itself."""
        shared = tensor.untyped_storage().data_ptr() in self._parameters
        if shared or tensor.nbytes < _SMALL_BYTES:
            return tensor
        array = tensor.detach().contiguous().numpy()
        path = self._folder / f"saved-{next(self._numbers)}"
        array.tofile(path)
        self.written_bytes += array.nbytes
        return path, array.dtype, array.shape

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor and remove its file; each is asked for once."""
        if isinstance(packed, torch.Tensor):
            return packed
        path, dtype, shape = packed
        array = numpy.fromfile(path, dtype=dtype).reshape(shape)
        path.unlink()
        return torch.from_numpy(array)


def spilled(case: Case) -> Trainer:
    """Saved tensors in files, written and read by hooks while the computation waits."""
    spill = FileSpill(case.scratch, case.model)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(spill.pack, spill.unpack):
            return loss_fn(case.model, batch)

    plain = trainer_of(loss_of, optimizer_of(case.model))
    return Trainer(step=plain.step, details=lambda: {"written_bytes": spill.written_bytes})


def mapped_states(case: Case) -> Trainer:
    """AdamW over memory-mapped files: the kernel decides which pages of its states are in memory."""
    optimizer = optimizer_of(case.model)
    for number, parameter in enumerate(case.model.parameters()):
        state: dict[str, torch.Tensor] = {"step": torch.tensor(0.0)}
        for name in ("exp_avg", "exp_avg_sq"):
            path = case.scratch / f"{name}-{number}"
            # A file that is only made longer reads as zeros, which is how both states begin.
            mapped = torch.from_file(
                str(path), shared=True, size=parameter.numel(), dtype=parameter.dtype
            )
            state[name] = mapped.view_as(parameter)
        optimizer.state[parameter] = state
    return trainer_of(lambda batch: loss_fn(case.model, batch), optimizer)


def checkpointed_mapped(case: Case) -> Trainer:
    """``torch.utils.checkpoint`` around each block, and AdamW over memory-mapped files."""
    _recompute_blocks(case)
    return mapped_states(case)


def ours(case: Case) -> Trainer:
    """GASCompile with the case's budget."""
    import gascompile

    assert case.budget is not None
    step = gascompile.compile_step(
        case.model,
        loss_fn,
        optimizer_of(case.model),
        case.budget,
        example_batch=case.first_batch,
        time_limit_s=case.planning_s,
    )

    def details() -> dict[str, Any]:
        plan, run = step.plan, step.last_run
        assert plan is not None and run is not None
        return {
            "predicted_s": plan.certificate.predicted_s,
            "limit_s": plan.certificate.limit_s,
            "strategy": plan.strategy,
            "budget_bytes": dict(plan.budget_bytes)["cpu"],
            "planned_peak_bytes": plan.peak_bytes["cpu"],
            "measured_peak_bytes": run.peak_bytes["cpu"],
            "link_bytes": dict(run.link_bytes),
            "stall_s": run.stall_s,
            "share_of_limit": run.share_of_limit,
            "paths": dict(run.paths),
        }

    return Trainer(step=step, details=details, close=step.close)


CONTENDERS: dict[str, Callable[[Case], Trainer]] = {
    "eager": eager,
    OURS: ours,
    "checkpoint": checkpointed,
    "spill": spilled,
    "mapped-adamw": mapped_states,
    "checkpoint-mapped": checkpointed_mapped,
    "compile-0.5": compiled_half,
    "compile-0.0": compiled_none,
}
