"""What modules keep beside tensors: ``get_extra_state``, of which checkpoints of a step know nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from gascompile.core.errors import UnsupportedOpError


def require_no_extra_states(model: nn.Module) -> None:
    """Refuse modules whose state is more than their tensors.

    Raises:
        UnsupportedOpError: names the module, and the way out.
    """
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            where = f"'{name}', a {type(module).__name__}," if name else type(module).__name__
            raise UnsupportedOpError(
                f"{where} has a get_extra_state, which checkpoints of a step do not hold; save step.state_dict() by "
                "torch.save, which has it, and give that to step.load_state_dict()"
            )


def is_of_tensors(model: nn.Module, kept: Mapping[str, Any]) -> bool:
    """Return whether ``model.state_dict(keep_vars=True)`` is its parameters and buffers, and nothing made of them."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return all(id(value) in own for value in kept.values())
