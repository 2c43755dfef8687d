"""Lightning: a strategy under which a module's training steps are planned for a memory budget.

Everything but the step itself is the library's: data, accumulation, schedulers, callbacks, validation, its own
checkpoints and how they are resumed.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import stateless
from torch.utils import _pytree as pytree

from gascompile.core.budget import Budget
from gascompile.core.errors import UnsupportedOpError
from gascompile.integrations.step_options import own_options
from gascompile.training.compile_step import compile_step
from gascompile.training.step import TrainingStep

_HOOKS = (
    "backward",
    "configure_gradient_clipping",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
)
"""Hooks for what happens inside of a planned step."""


class GasStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # the library may not be there
    """Keeps a memory budget: ``Trainer(strategy=GasStrategy("2GiB"))``.

    ``training_step`` is traced: it returns a loss, or a dict with one, and may log that loss. Between the first
    batch and the end of ``fit`` the module's values are where the step keeps them; checkpoints, validation and
    callbacks read them as ever.
    """

    strategy_name = "gascompile"

    def __init__(
        self,
        budget: Budget | int | str | None = None,
        *,
        step_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Take what the steps are planned for.

        Args:
            budget: memory the steps may take in the tier that computes (``"2GiB"``, bytes), or a ``Budget``.
            step_options: further arguments of ``compile_step``: ``machine``, ``cache_dir``, ``checkpoint``,
                ``states``, ``on_nan`` and so on.
            **options: of ``SingleDeviceStrategy``; values lie on the processor.

        Raises:
            ValueError: ``step_options`` has what the trainer says.
        """
        super().__init__(device="cpu", **options)
        self._budget = budget
        self._step_options = own_options(step_options, "the trainer or its module")
        self._step: TrainingStep | None = None
        self._count = 1
        self._logs: list[tuple[str, dict[str, Any]]] = []

    @property
    def step(self) -> TrainingStep | None:
        """The step that is open while ``fit`` runs, for its ``plan`` and ``last_run``."""
        return self._step

    def setup(self, trainer: Any) -> None:
        """Refuse what would be trained otherwise than by Lightning.

        Raises:
            UnsupportedOpError: says what to do.
        """
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self._require_followed(trainer)

    def model_to_device(self) -> None:
        """Leave values where they are: the processor, or the meta device where they come from a checkpoint."""

    def training_step(self, batch: Any, *_: Any) -> torch.Tensor:
        """Run one planned step, with an update where the trainer would make one after it; return the loss.

        Raises:
            UnsupportedOpError: the step looks at what changes from batch to batch, or logs more than the loss.
        """
        module, trainer = self._module(), self._module().trainer
        count: int = trainer.accumulate_grad_batches
        if self._step is None:
            self._count = count
            loss_fn = _ModuleLoss(self._autocast(), count, takes_number=_takes_number(module))
            with _apart(module):
                self._logs = _logged(module, loss_fn, batch)
                self._step = compile_step(
                    module,
                    loss_fn,
                    self.optimizers[0],
                    self._budget,
                    batch,
                    accumulate=count,
                    max_grad_norm=trainer.gradient_clip_val or None,
                    **self._step_options,
                )
        if count != self._count:
            _refuse(
                f"accumulate_grad_batches was {self._count} and is {count} now, and a planned step divides its loss by "
                "it; leave it as it is"
            )
        updates = not trainer.fit_loop._should_accumulate()
        with _apart(module):
            share = self._step(batch, updates=updates)
        # What the module has returned, but for the last digit where the number is no power of two.
        loss: torch.Tensor = share * count
        for name, options in self._logs:
            module.log(name, loss, **options)
        return loss

    def backward(self, closure_loss: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the loss: the step has gone backward."""
        return closure_loss

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002 - the step has updated
        closure: Callable[[], Any],
        model: Any = None,  # noqa: ARG002 - the module's
        **_: Any,
    ) -> Any:
        """Let the trainer's closure run, in which the step updates."""
        return closure()

    def teardown(self) -> None:
        """Give the values back to module and optimizer."""
        step, self._step = self._step, None
        if step is not None:
            step.close()
        super().teardown()

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None, "the trainer has connected it"
        return self.lightning_module

    def _autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if isinstance(self.precision_plugin, MixedPrecision) else None

    def _require_followed(self, trainer: Any) -> None:
        module, precision = self._module(), self.precision_plugin
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            _refuse(
                "torchrun has started several processes, and this strategy trains in one; start it without"
            )
        if not module.automatic_optimization or len(self.optimizers) != 1:
            _refuse(
                f"{type(module).__name__} has {len(self.optimizers)} optimizers, or steps them by itself: a planned "
                "step has one optimizer and updates; call gascompile.compile_step in a loop of your own"
            )
        if type(precision) is not Precision and precision.precision != "bf16-mixed":
            _refuse(f"precision='{precision.precision}'; use '32-true' or 'bf16-mixed'")
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm not in (None, "norm"):
            _refuse("gradient_clip_algorithm='value'; planned steps clip by the global norm")
        for owner, base in ((module, LightningModule), *((c, Callback) for c in trainer.callbacks)):
            for name in _HOOKS:
                own = getattr(type(owner), name, None)
                if own is not None and own is not getattr(base, name, None):
                    _refuse(
                        f"{type(owner).__name__} has the hook '{name}', and gradients are inside of a planned step; "
                        "leave it out"
                    )


def _refuse(why: str) -> NoReturn:
    raise UnsupportedOpError(why)


class _ModuleLoss:
    """The loss that a module's ``training_step`` returns, as a share of its update's."""

    def __init__(
        self, autocast: torch.dtype | None, num_batches: int, *, takes_number: bool
    ) -> None:
        self.autocast, self.num_batches, self.takes_number = autocast, num_batches, takes_number

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = self.whole(model, batch)
        return loss if self.num_batches == 1 else loss / self.num_batches

    def _precision(self) -> AbstractContextManager[Any]:
        dtype = self.autocast
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    def whole(self, model: Any, batch: Any) -> torch.Tensor:
        running = _in_step.set(True)
        try:
            with self._precision():
                loss = model.training_step(batch, *([_NUMBER] if self.takes_number else []))
        finally:
            _in_step.reset(running)
        if isinstance(loss, Mapping):
            loss = loss["loss"]
        if not isinstance(loss, torch.Tensor):
            _refuse(f"training_step returned {type(loss).__name__}; it has to return a loss")
        return loss


class _Untraced:
    """Stands for what changes from step to step, and refuses to be looked at by what is traced."""

    def __init__(self, what: str) -> None:
        self._what = what

    def _refuse(self, *_: Any) -> NoReturn:
        _refuse(
            f"training_step looks at {self._what}, which a planned step would keep as it was when it was traced; use a "
            "hook such as on_train_batch_end, or a buffer of the module"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if _in_step.get():
            self._refuse()
        raise AttributeError(name)

    def __eq__(self, other: object) -> bool:
        if _in_step.get():
            self._refuse()
        return self is other

    def __bool__(self) -> bool:
        if _in_step.get():
            self._refuse()
        return True

    __hash__ = object.__hash__
    __index__ = __int__ = __float__ = __format__ = __str__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __floordiv__ = __truediv__ = __rtruediv__ = _refuse


_in_step: ContextVar[bool] = ContextVar("_in_step", default=False)
"""Whether a module's ``training_step`` runs."""
_NUMBER = _Untraced("batch_idx")
_TRAINER = _Untraced("the trainer, such as current_epoch or global_step")


def _no_log(*_: Any, **__: Any) -> None:
    """Take no note: what a step logs is known before it is traced."""


@contextmanager
def _apart(module: LightningModule) -> Iterator[None]:
    """Keep a module from its trainer, which is no part of what is traced, and what it logs from the trainer."""
    own, before = module.__dict__, dict(module.__dict__)
    own.update(_trainer=_TRAINER, log=_no_log, log_dict=_no_log)
    try:
        yield
    finally:
        own["_trainer"] = before["_trainer"]
        for name in ("log", "log_dict"):
            own.pop(name)


def _logged(
    module: LightningModule, loss_fn: _ModuleLoss, batch: Any
) -> list[tuple[str, dict[str, Any]]]:
    """Return the names under which a module logs its loss, with the options of each.

    Raises:
        UnsupportedOpError: it logs something else.
    """
    seen: list[tuple[str, Any, dict[str, Any]]] = []

    def log(name: str, value: Any, **options: Any) -> None:
        seen.append((name, value, options))

    def log_dict(values: Mapping[str, Any], **options: Any) -> None:
        for name, value in values.items():
            log(name, value, **options)

    own = module.__dict__
    own.update(log=log, log_dict=log_dict)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.random.fork_rng(devices=()):
            fakes: dict[str, torch.Tensor] = {
                name: mode.from_tensor(tensor)
                for name, tensor in (*module.named_parameters(), *module.named_buffers())
            }
            batch = pytree.tree_map_only(torch.Tensor, mode.from_tensor, batch)
            with stateless._reparametrize_module(module, fakes):
                loss = loss_fn.whole(module, batch)
    finally:
        own.update(log=_no_log, log_dict=_no_log)
    for name, value, _ in seen:
        if value is not loss and not _is_detached(value, loss):
            _refuse(
                f"training_step logs '{name}', which is not the loss that it returns, and a planned step returns "
                "nothing else; log it in validation_step"
            )
    return [(name, options) for name, _, options in seen]


def _is_detached(value: Any, loss: torch.Tensor) -> bool:
    """Return whether a value is the loss without its graph."""
    return (
        isinstance(value, torch.Tensor)
        and value.shape == loss.shape
        and value.untyped_storage()._cdata == loss.untyped_storage()._cdata
    )


def _takes_number(module: LightningModule) -> bool:
    """Return whether ``training_step`` takes ``batch_idx``, too."""
    names = list(inspect.signature(module.training_step).parameters)
    if "dataloader_iter" in names:
        _refuse("training_step takes batches from dataloader_iter by itself; let it take a batch")
    return len(names) > 1
