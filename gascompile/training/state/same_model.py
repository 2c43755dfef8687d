"""Same model: whether a state is of the model that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gascompile.core.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]


def require_same(model: str, shapes: Shapes, wanted: Shapes) -> None:
    """Refuse a state that has other tensors than the model.

    Args:
        model: name of its class.
        shapes: of the state's tensors.
        wanted: of the model's.

    Raises:
        CheckpointError: names the keys.
    """
    missing, extra = sorted(set(wanted) - set(shapes)), sorted(set(shapes) - set(wanted))
    other = [n for n in sorted(set(wanted) & set(shapes)) if wanted[n] != shapes[n]]
    said = [f"lacks {_some(missing)}"] if missing else []
    said += [f"has {_some(extra)} that the model does not"] if extra else []
    said += [
        f"has '{name}' as {list(shapes[name])} where the model's is {list(wanted[name])}"
        for name in other[:3]
    ]
    if said:
        raise CheckpointError(
            f"the state is of another model than {model}: it {'; it '.join(said)}"
        )


def shapes_of(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a state's tensors."""
    return {n: tuple(value.shape) for n, value in state.items() if isinstance(value, torch.Tensor)}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more
