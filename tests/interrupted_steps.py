"""Training steps to interrupt: taking them, their checkpoints, and how they end; see ``tests.interrupts``."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

import gascompile
from gascompile.core.errors import StorageError
from tests.training.runs import MACHINE, PLANNING_S, TinyGPT, adamw, batches, compiled, new_model


class Trained:
    """Steps whose states leave memory. After an interrupt a step goes on, or says what to do."""

    def __init__(self, folder: Path) -> None:
        self.step = self.opened(folder)
        self.folder, self.batches = folder / "checkpoints", batches(3)
        torch.manual_seed(5)
        self.step(self.batches[0])
        self.step.save(self.folder)
        self.expected = [float(self.step(batch)) for batch in self.batches[1:]]
        self.typed = 0
        self.step.load(self.folder)
        self.random = torch.get_rng_state()

    def opened(self, folder: Path) -> gascompile.TrainingStep:
        """Return the step."""
        model = new_model(width=48).train()
        return compiled(model, adamw(model), folder, budget=(4 << 20) + 500_000)

    def act(self) -> None:
        """Take a step."""
        if self.step.num_steps > 1:
            self.step.load(self.folder)
        self.step(self.batches[1])

    def check(self) -> None:
        """Go on from where it is, else from the checkpoint."""
        assert torch.is_grad_enabled()
        taken = self.step.num_steps - 1
        if not taken:
            torch.set_rng_state(self.random)
        try:
            found = float(self.step(self.batches[1 + taken]))
        except StorageError as error:
            if "load(folder)" not in str(error):
                raise
            self.typed += 1
            self.step.load(self.folder)
            taken, found = 0, float(self.step(self.batches[1]))
        assert found == self.expected[taken], (taken, found, self.expected)
        self.step.load(self.folder)


class Frozen(Trained):
    """Steps that read most of their weights where a checkpoint has them."""

    def opened(self, folder: Path) -> gascompile.TrainingStep:
        """Return the step, of a model on the meta device."""
        save_model(new_model(width=48), str(folder / "model.safetensors"))
        with torch.device("meta"):
            model = TinyGPT(48).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("qkv" in name or name.endswith("bias"))
        path, budget = folder / "model.safetensors", (4 << 20) + 500_000
        return compiled(model, adamw(model), folder, budget=budget, checkpoint=path)


class Unplanned(Trained):
    """Steps whose updates are torch's own, on values that the model has for so long."""

    def opened(self, folder: Path) -> gascompile.TrainingStep:
        """Return the step."""
        model = new_model(width=48).train()
        optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
        return compiled(model, optimizer, folder, budget=6 << 20, unplanned_optimizer=True)


class Checkpointed(Trained):
    """Saving checkpoints of it."""

    def act(self) -> None:
        """Take a checkpoint of what the last one holds."""
        self.step.load(self.folder)
        self.step.save(self.folder)

    def check(self) -> None:
        """Go on from the checkpoint that is there."""
        self.step.load(self.folder)
        assert float(self.step(self.batches[1])) == self.expected[0]


class Ended:
    """Closing a training step: its values are with it or back in the model, and a second call ends it."""

    in_files = False
    """Whether values come from a checkpoint, half of them in place."""

    def __init__(self, folder: Path) -> None:
        """Plan once to know what is right."""
        self.folder, self.batch = folder, torch.linspace(-1, 1, 4 * 96).view(4, 96)
        self.number, self.expected = 0, dict[str, torch.Tensor]()
        self.begin()
        self.step.close()
        self.expected = copied(self.model)
        self.moments = self.optimizer.state_dict()["state"]
        self.begin()

    def begin(self) -> None:
        """Take one step, of a model whose states leave memory."""
        torch.manual_seed(5)
        self.model = self.made()
        options: dict[str, Any] = {}
        if self.in_files:
            self.model[0].requires_grad_(False)
            options["checkpoint"] = self.folder / "model.safetensors"
            if not self.expected:
                save_model(self.model, str(options["checkpoint"]))
            self.model.to("meta")
        self.step = gascompile.compile_step(
            self.model,
            lambda model, batch: model(batch).square().mean(),
            adamw(self.model),
            (4 << 20) + 220_000,
            machine=MACHINE,
            cache_dir=self.folder,
            time_limit_s=PLANNING_S,
            **options,
        )
        self.step(self.batch)
        self.optimizer = self.step.optimizer

    def made(self) -> nn.Sequential:
        """Return a model."""
        return nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 96))

    def act(self) -> None:
        """Close it."""
        self.step.close()

    def check(self) -> None:
        """Read what is open, closed or being closed; close it again, and take the next one."""
        self.compare()
        self.step.close()
        self.compare()
        self.begin()

    def compare(self) -> None:
        """Read values and moments, either first."""
        self.number += 1
        if self.number % 2:
            self.compare_moments()
        found = copied(self.model)
        for name, expected in self.expected.items():
            assert torch.equal(found[name], expected), name
        self.compare_moments()

    def compare_moments(self) -> None:
        """Read the optimizer."""
        found = self.optimizer.state_dict()["state"]
        torch.testing.assert_close(found, self.moments, rtol=0, atol=0)


class EndedInFiles(Ended):
    """The same where half of the model is read in place."""

    in_files = True


class Dropped(Ended):
    """Dropping it without closing, which gives its values back, and the moments."""

    def act(self) -> None:
        """Drop it."""
        del self.step
        gc.collect()

    def check(self) -> None:
        """Read what it has given back, and take the next one."""
        if hasattr(self, "step"):
            self.act()
        self.compare()
        assert all(type(value) is nn.Parameter for value in self.model.parameters())
        self.begin()


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's values."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


STEPS: dict[str, type[Trained | Ended]] = {
    "training": Trained,
    "frozen": Frozen,
    "unplanned": Unplanned,
    "checkpoints": Checkpointed,
    "close of a step": Ended,
    "close of frozen": EndedInFiles,
    "drop of a step": Dropped,
}
