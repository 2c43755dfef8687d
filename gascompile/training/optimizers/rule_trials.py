"""Rule trials: an optimizer's class has to do what its rule says, or is refused.

Another version of a library may read other options or keep other states, which a planned update would not know of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gascompile.core.errors import UnsupportedOpError
from gascompile.training.optimizers.class_rules import KERNELS, ClassRule
from gascompile.training.optimizers.class_updates import StandIn

_done: set[tuple[str, tuple[str, ...]]] = set()
"""Names of rules with what their classes were found to keep."""
_BESIDE = ("step", "RMS")
"""What classes list among their states, and neither read nor keep from one update to the next but as a count."""


def require_followed(rule: ClassRule, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that does not do what its rule says.

    Raises:
        UnsupportedOpError: says what differs.
    """
    if unknown := sorted(set(optimizer.defaults) - {*rule.options, *KERNELS}):
        _refuse(rule, f"has the option '{unknown[0]}'")
    if vars(optimizer).get("decoupled_wd"):
        _refuse(rule, "divides weight decay by its first rate (decoupled_weight_decay=True)")
    for group in optimizer.param_groups:
        for name in ("capturable", "differentiable"):
            if group.get(name):
                _refuse(rule, f"has {name}=True")
        try:
            numbers = rule.numbers(group)
        except (TypeError, ValueError) as error:
            _refuse(rule, f"has an option that is no number: {error}")
        else:
            kept = (rule.name, tuple(rule.keys(rule.values(numbers))))
            if kept not in _done:
                _try(rule, numbers)
                _done.add(kept)


def _try(rule: ClassRule, numbers: Sequence[float]) -> None:
    """Let the class update small parameters, and compare what it keeps with what the rule says."""
    options = rule.values(numbers)
    for shape in ((2, 3), (3,)) if rule.kind != "Muon" else ((2, 3),):
        parameter, gradient = torch.ones(shape), torch.ones(shape)
        wanted = {key: rule.like(key, parameter) for key in rule.states(options, parameter.dim())}
        begun = {
            key: torch.zeros(wanted[key].shape).fill_(value)
            for key, value in rule.first(options).items()
        }
        state = StandIn.of(rule).step(parameter, gradient, begun, options, 0)
        kept = {key: value for key, value in state.items() if key not in _BESIDE}
        fits = kept.keys() == wanted.keys() and all(
            isinstance(value, torch.Tensor) and value.shape == wanted[key].shape
            for key, value in kept.items()
        )
        if not fits or ("step" in state) != rule.counts:
            _refuse(rule, f"keeps {sorted(state)} of a parameter, not {sorted(wanted)}")


def _refuse(rule: ClassRule, why: str) -> None:
    raise UnsupportedOpError(
        f"the {rule.kind} {why}, which no planned update knows; make it without, or pass unplanned_optimizer=True"
    )
