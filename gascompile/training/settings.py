"""How a training step is to behave: what users choose beside model, loss, optimizer and budget."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gascompile.core.config import number_of
from gascompile.core.errors import CaptureError, NanLossError, PlanMismatchError
from gascompile.core.ranks import RankLayout, StageLayout
from gascompile.training.optimizers.optimizers import STATE_FORMS, StateForm
from gascompile.training.optimizers.slots import Stage
from gascompile.training.planning.step_program import StepOptions

OnNan = Literal["raise", "locate", "ignore"]
_ON_NAN = ("raise", "locate", "ignore")
_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
"""Ops whose results hold whatever lay there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """See ``compile_step``."""

    max_grad_norm: float | None = None
    grad_norm: bool = False
    """The norm of gradients is wanted where nothing is clipped, too."""
    accumulate: int = 1
    on_nan: OnNan = "raise"
    replan: bool = True
    unplanned: bool = False
    """Torch's own optimizer updates."""
    states: StateForm = "fp32"
    layout: RankLayout | None = None
    """Of several ranks that train the model together."""
    stages: Mapping[str, Stage] = field(default_factory=dict)
    """Parameters that are divided among them; planning finds which."""
    beside: bool = False
    """Gradients are summed over them beside ops; planning finds whether."""
    is_pipeline: bool = False
    """The ranks are stages, and the rows of all are the same."""
    placed: StageLayout | None = None
    """Of a pipeline: which stage has which parameters; planning finds it."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: one cannot be.
        """
        # 1.5 would update at each third batch.
        count = number_of(self.accumulate)
        if not (count >= 1 and float(count).is_integer()):
            raise ValueError(
                f"accumulate={self.accumulate!r}; it is a number of batches, from 1 on"
            )
        object.__setattr__(self, "accumulate", int(count))
        if self.max_grad_norm is not None:
            limit = number_of(self.max_grad_norm)
            if not limit > 0:
                raise ValueError(
                    f"max_grad_norm={self.max_grad_norm!r}; it is a number, of more than 0"
                )
            object.__setattr__(self, "max_grad_norm", limit)
        if self.on_nan not in _ON_NAN:
            raise ValueError(f"on_nan={self.on_nan!r}; it is one of {', '.join(_ON_NAN)}")
        if self.states not in STATE_FORMS:
            raise ValueError(f"states={self.states!r}; it is one of {', '.join(STATE_FORMS)}")
        if self.unplanned and self.states != "fp32":
            raise ValueError(
                f"states={self.states!r} is of planned updates; leave it out, or unplanned_optimizer"
            )

    @property
    def of_all(self) -> list[object]:
        """What has to be the same on all ranks: what a step does, and when it ends in an error."""
        clips = [self.max_grad_norm, self.grad_norm]
        return [*clips, self.accumulate, self.on_nan, self.unplanned, self.states]

    def updates_at(self, num_batches: int, asked: bool | None = None) -> bool:
        """Return whether the batch after ``num_batches`` others ends with an update, unless that is ``asked`` for.

        Raises:
            ValueError: none is asked for, and a step keeps no gradients.
        """
        if asked is None:
            return (num_batches + 1) % self.accumulate == 0
        if not asked and self.accumulate == 1:
            raise ValueError(
                "updates=False needs a step that adds up gradients; pass accumulate=2 or more to compile_step"
            )
        return asked

    def program(
        self,
        *,
        updates: bool,
        trains: bool = True,
        calls: bool = False,
        pending: frozenset[str] = frozenset(),
    ) -> StepOptions:
        """Return what a step does that ends with an update, one that only adds up gradients, or an evaluation."""
        return StepOptions(
            trains=trains,
            calls=calls,
            max_grad_norm=self.max_grad_norm,
            grad_norm=self.grad_norm,
            accumulates=self.accumulate > 1 or self.unplanned,
            updates=updates and not self.unplanned,
            pending=pending,
            refuses_nan=trains and self.on_nan != "ignore",
            layout=None if self.is_pipeline else self.layout,
        )

    def watch(self, step: int) -> contextlib.AbstractContextManager[object]:
        """Return a context for a run of the step: it finds the op that makes the first NaN, where asked to."""
        return _FirstNan(step) if self.on_nan == "locate" else contextlib.nullcontext()

    def require_replan(self, kinds: object, planned: int) -> None:
        """Refuse a batch of another kind than the one planned for, unless every kind is planned for.

        Raises:
            PlanMismatchError: says which batch it is.
        """
        if planned and not self.replan:
            raise PlanMismatchError(
                f"the step is planned for other batches than {kinds}; pad batches to one shape, or pass replan=True"
            )


def require_known(names: Collection[str], known: Collection[str]) -> None:
    """Refuse a step that needs tensors for which the first step of the run took no room.

    Raises:
        CaptureError: names one.
    """
    if missing := sorted(set(names) - set(known)):
        raise CaptureError(
            f"a step for this kind of batch needs '{missing[0]}', which the first step did not have; let all batches "
            "train the same parameters and use the same constants"
        )


class _FirstNan(TorchDispatchMode):
    """Looks at every result; takes memory beside the budget to do so."""

    def __init__(self, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._step = step

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _UNWRITTEN:
            return result
        for value in pytree.tree_leaves(result):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and _has_nan(value):
                raise NanLossError(step=self._step, op=str(func))
        return result


def _has_nan(value: torch.Tensor) -> bool:
    return bool(value.numel()) and bool(torch.isnan(value).any())
