"""Covers: all tensors of a model whose values a step has, and what else of a model and its optimizer follows them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gascompile.core.errors import OpenStepError, UnsupportedOpError
from gascompile.training.state.aliasing import places
from gascompile.training.state.open_tensors import Cover, OpenTensor


class Covers:
    """Opens a model's tensors, and closes them."""

    def __init__(
        self,
        model: nn.Module,
        tensors: Mapping[str, torch.Tensor],
        *,
        like: Callable[[str], torch.Tensor],
        value: Callable[[str], torch.Tensor],
        assign: Callable[[str, torch.Tensor], None],
        settle: Callable[[], object],
        shared: Collection[str] = (),
    ) -> None:
        """Change nothing yet.

        Args:
            model: the owner of ``tensors``.
            tensors: by the names that the other arguments take.
            like: returns a tensor that has the layout alone.
            value: returns a copy.
            assign: takes a new value.
            settle: blocks while values go back into the model, whose asker was interrupted.
            shared: names of tensors that are views of others, or have views.
        """
        self._model = model
        self._covers = [
            Cover(
                name,
                tensor,
                like(name),
                partial(value, name),
                partial(assign, name),
                wait=settle,
                settle=settle,
                is_shared=name in shared,
            )
            for name, tensor in tensors.items()
        ]
        # Once, where a module has several names.
        self.modules = list(model.modules())
        self.parameters = list(model.parameters())
        place_of = {(id(held), leaf): (held, leaf, held[leaf]) for _, (held, leaf) in places(model)}
        self._places = list(place_of.values())
        self._names = self._names_of_now()
        self._asked = self._asked_of_now()
        self._look()
        self._handles = [
            module.register_state_dict_post_hook(_with_values) for module in self.modules
        ]
        self._handles.append(register_optimizer_step_pre_hook(_refuse_open))
        self.put()

    def put(self) -> None:
        """Let all tensors be open."""
        for cover in self._covers:
            cover.allows_steps = False
            if not cover.is_open:
                cover.put()

    def lift(self) -> None:
        """Let all be as they were, without values unless they were given some; idempotent."""
        for cover in self._covers:
            cover.lift()

    def lift_for_step(self, names: Collection[str]) -> None:
        """Let these be as they were, and the optimizer take a step of its own, until all are put again."""
        for cover in self._covers:
            if cover.name in names:
                cover.lift()
            cover.allows_steps = True

    def changed(self) -> None:
        """Take note that values have changed."""
        for cover in self._covers:
            cover.forget_copy()

    def require_in_place(self) -> None:
        """Refuse a model that has other tensors than those that the step has, or gradients that it would not see.

        Raises:
            OpenStepError: a gradient was computed outside of the step.
            UnsupportedOpError: the model has changed.
        """
        self.require_own()
        # Asked in Python, each tensor would answer by a function of torch's.
        with torch._C.DisableTorchFunctionSubclass():
            given = next((c for c in self._covers if c.is_open and c.tensor.grad is not None), None)
        for cover in self._covers:
            cover.require_followed()
        if given is not None:
            raise OpenStepError(
                f"'{given.name}' has a gradient from outside of the step, which no update would use; put what it "
                "is of into loss_fn, or call zero_grad()"
            )

    def require_own(self) -> None:
        """Refuse a model that has other tensors than those that the step has.

        Raises:
            UnsupportedOpError: the model has changed.
        """
        if not self._is_as_seen() or self._asked_of_now() != self._asked:
            self._require_same()

    def _require_same(self) -> None:
        count = sum(len(m._parameters) + len(m._buffers) for m in self.modules)
        same = all(held.get(leaf) is tensor for held, leaf, tensor in self._places)
        none = sum(
            v is None for m in self.modules for v in (*m._parameters.values(), *m._buffers.values())
        )
        if (
            not same
            or count - none != len(self._places)
            or list(self._model.modules()) != self.modules
            or self._names_of_now() != self._names
            or self._asked_of_now() != self._asked
        ):
            raise UnsupportedOpError(
                f"{type(self._model).__name__} has other modules, parameters or buffers than the step was made for; "
                "close the step, change the model and the optimizer, and compile a new one"
            )
        self._look()

    def _names_of_now(self) -> list[list[str]]:
        """Return the names of parameters and buffers, of those that are ``None``, too."""
        return [list(table) for m in self.modules for table in (m._parameters, m._buffers)]

    def _asked_of_now(self) -> list[object]:
        """Return what a loss may ask of buffers and no cover answers for."""
        having = [m for m in self.modules if m._buffers]
        with torch._C.DisableTorchFunctionSubclass():
            wanting = [
                buffer is not None and buffer.requires_grad
                for m in having
                for buffer in m._buffers.values()
            ]
        return [wanting, *(set(m._non_persistent_buffers_set) for m in having)]

    def _look(self) -> None:
        """Take note of all that modules are made of, so that the next look takes little."""
        self._tables = self._tables_of_now()
        self._owners = [table for table in self._tables for _ in table]
        self._keys = [key for table in self._tables for key in table]
        self._values = [value for table in self._tables for value in table.values()]

    def _tables_of_now(self) -> list[dict[str, Any]]:
        return [table for m in self.modules for table in (m._parameters, m._buffers, m._modules)]

    def _is_as_seen(self) -> bool:
        """Return whether all modules are made of what they were made of at the last look."""
        tables = self._tables_of_now()
        if not all(map(operator.is_, tables, self._tables)):
            return False
        try:
            entries = map(operator.getitem, self._owners, self._keys)
            return sum(map(len, tables)) == len(self._keys) and all(
                map(operator.is_, entries, self._values)
            )
        except KeyError:
            return False

    def close(self) -> None:
        """Lift all for good; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for cover in self._covers:
            cover.close()


def _with_values(module: nn.Module, state: Any, prefix: str, _metadata: Any) -> None:
    """Let a state hold plain copies; tensors that are one tensor have one copy."""
    for held in (module._parameters, module._buffers):
        for leaf, own in held.items():
            saved = state.get(prefix + leaf)
            if isinstance(saved, OpenTensor) and saved is not own and isinstance(own, OpenTensor):
                state[prefix + leaf] = own._cover.shared_copy()


def _refuse_open(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, OpenTensor) and not parameter._cover.allows_steps:
                raise OpenStepError(
                    f"'{parameter._cover.name}' belongs to an open training step, which updates it by itself; leave "
                    f"out step() of this {type(optimizer).__name__}, or put all parameters into groups of one optimizer"
                )
