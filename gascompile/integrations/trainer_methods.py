"""Trainer methods: which of those that a subclass or its users replace a planned step follows, and which it cannot."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from gascompile.capture.fingerprint.code_names import names_of
from gascompile.capture.fingerprint.code_origin import origin_of_code
from gascompile.core.errors import UnsupportedOpError

_IN_THE_STEP = ("_clip_grad_norm", "_get_grad_norm")
_BETWEEN = "between the gradients and the update, which a planned step makes in one"


def takes_library_loss(trainer: Trainer) -> bool:
    """Return whether the loss is computed by the library's own method, which nobody has replaced."""
    method: Any = type(trainer).compute_loss
    is_inherited = method is Trainer.compute_loss
    return is_inherited and origin_of_code(method).versioned


def require_methods(trainer: Trainer, own: type[Trainer]) -> None:
    """Refuse a trainer with methods that its planned steps would pass by.

    Args:
        trainer: of the class ``own`` or of one made from it.
        own: the class that trains by planned steps.

    Raises:
        UnsupportedOpError: says which, and what to do.
    """
    kind = type(trainer)
    order = kind.__mro__
    for base in order[order.index(own) + 1 : order.index(Trainer)]:
        if "training_step" in vars(base):
            raise UnsupportedOpError(
                f"training_step of {base.__name__} would never be called: {own.__name__}'s comes before it. Name "
                f"{base.__name__} first: class {kind.__name__}({base.__name__}, {own.__name__})"
            )
    for name in _IN_THE_STEP:
        if getattr(kind, name) is not getattr(own, name) or name in vars(trainer):
            raise UnsupportedOpError(
                f"{name} of {kind.__name__} would work {_BETWEEN}; use max_grad_norm, or Trainer"
            )
    step: Any = kind.training_step
    if step is not own.training_step and hasattr(step, "__code__"):
        attributes = names_of(step.__code__).attributes
        named = sorted(n for n in attributes if n == "grad" or n.startswith("clip_grad"))
        if named:
            raise UnsupportedOpError(
                f"training_step of {kind.__name__} uses '{named[0]}' {_BETWEEN}: there are no gradients by then. Use "
                "max_grad_norm, or Trainer"
            )


def require_class_loss(trainer: Trainer) -> None:
    """Refuse a loss that is set on the trainer itself.

    Raises:
        UnsupportedOpError: there is one.
    """
    if "compute_loss" in vars(trainer):
        raise UnsupportedOpError(
            "compute_loss is set on the trainer itself, and a planned step takes that of its class: define it in a "
            "subclass, or pass compute_loss_func"
        )
