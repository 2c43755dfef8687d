"""Outlines: what code can ask of a model's parameters and buffers besides their values, compared at each call.

That is which there are, under which names and in which order, which are ``None`` and which are one object, and the
class, shape, dtype, strides and place of each. A trace bakes all of it in, of tensors that none of its ops reads, too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch._C import _InferenceMode
from torch._C._dynamo.guards import TensorGuards, dict_version

Held = torch.Tensor | None
Owners = list[dict[str, Held]]

_KINDS = ("_parameters", "_buffers")
_UNSAVED = "_non_persistent_buffers_set"
_UNSAVED_OF = operator.itemgetter(_UNSAVED)
_PLAIN = {torch.Tensor, nn.Parameter, nn.Buffer}
"""Of which torch compares all that counts by itself."""


class TensorOutline(NamedTuple):
    """What is known of one tensor."""

    kind: type
    shape: tuple[int, ...] | None
    """``None`` where it has none, or is still to get one."""
    dtype: torch.dtype
    requires_grad: bool
    layout: torch.layout
    bits: tuple[bool, bool]
    """Whether it stands for the conjugate, or the negative, of its memory."""
    stride: tuple[int, ...]
    """Empty where it has none."""
    device: torch.device
    is_open: bool
    """Whether a step, or a compiled model, has its value and keeps it as it likes."""

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorOutline:
        """Look at a tensor past what its class would answer."""
        cover = vars(tensor).get("_cover")
        with torch._C.DisableTorchFunctionSubclass():
            has_shape = not nn.parameter.is_lazy(tensor) and not tensor.is_nested
            has_strides = has_shape and tensor.layout is torch.strided
            return TensorOutline(
                kind=type(tensor) if cover is None else cover.own,
                shape=tuple(tensor.shape) if has_shape else None,
                dtype=tensor.dtype,
                requires_grad=tensor.requires_grad,
                layout=tensor.layout,
                bits=(tensor.is_conj(), tensor.is_neg()),
                stride=tensor.stride() if has_strides else (),
                device=tensor.device,
                is_open=cover is not None,
            )

    def differs_from(self, now: TensorOutline) -> str | None:
        """Return in words what of it is another in ``now``, or ``None``.

        Values may have gone to files or to a compiled model meanwhile: how they lie there does not count.
        """
        is_away = self.is_open or now.is_open or now.device.type == "meta"
        for field in self._fields[: -3 if is_away else -1]:
            was, new = getattr(self, field), getattr(now, field)
            if was != new:
                return f"had the {field} {was} and has {new} now"
        return None


class ModelOutlines:
    """The outlines that a model's parameters and buffers had; no tensor is kept alive."""

    def __init__(self, model: nn.Module) -> None:
        """Take note of all."""
        named = list(model.named_modules())
        self._paths = [path for path, _ in named for _ in _KINDS]
        self._spaces = [vars(module) for _, module in named for _ in _KINDS]
        self._kinds = [kind for _ in named for kind in _KINDS]
        self._with_buffers = [vars(module) for _, module in named if module._buffers]
        self._unsaved = [set(space[_UNSAVED]) for space in self._with_buffers]
        owners = list(map(operator.getitem, self._spaces, self._kinds))
        versions = list(map(dict_version, owners))
        self._keys = list(map(list, owners))
        held = _held(owners)
        self._outlines = [None if tensor is None else TensorOutline.of(tensor) for tensor in held]
        self._firsts = _firsts(held)
        self._take(owners, versions, held)

    def _take(self, owners: Owners, versions: list[int], held: Sequence[Held]) -> None:
        """Have these told at once from here on: they are as those that were noted."""
        self._versions = versions
        rows = zip(owners, self._keys, strict=True)
        places = [(owner, key) for owner, keys in rows for key in keys]
        apart = [i for i, first in enumerate(_firsts(held)) if i == first]
        tensors = {i: tensor for i in apart if (tensor := held[i]) is not None}
        plain = [i for i, tensor in tensors.items() if _is_plain(tensor)]
        others = sorted(tensors.keys() - set(plain))
        self._plain = [places[i][0] for i in plain], [places[i][1] for i in plain]
        self._others = [(*places[i], TensorOutline.of(tensors[i])) for i in others]
        self._guards = None
        if plain:
            fixed = dict.fromkeys(("dynamic_dims_sizes", "dynamic_dims_strides"))
            with _InferenceMode(False):
                self._guards = TensorGuards(*map(tensors.get, plain), **fixed)

    def changed(self) -> str | None:
        """Return the first that is another now, in words, or ``None``."""
        if self._is_as_taken():
            return None
        if list(map(_UNSAVED_OF, self._with_buffers)) != self._unsaved:
            return "other buffers than before are a part of its state"
        owners: Owners = list(map(operator.getitem, self._spaces, self._kinds))
        versions = list(map(dict_version, owners))
        if (text := self._other_names(owners)) is not None:
            return text
        held = _held(owners)
        if (text := self._other_tensors(held)) is None:
            self._take(owners, versions, held)
        return text

    def _is_as_taken(self) -> bool:
        """Return whether all are as those that were taken, as far as C code can tell."""
        # One changes with whatever is set or taken away, and no two dictionaries have the same.
        versions = map(dict_version, map(operator.getitem, self._spaces, self._kinds))
        if (
            list(versions) != self._versions
            or list(map(_UNSAVED_OF, self._with_buffers)) != self._unsaved
        ):
            return False
        if self._guards is not None:
            # Whether gradients are wanted counts, whatever mode the call is made in.
            with _InferenceMode(False):
                if not self._guards.check(*map(operator.getitem, *self._plain)):
                    return False
        others = ((owner[key], was) for owner, key, was in self._others)
        return all(now is not None and TensorOutline.of(now) == was for now, was in others)

    def _name(self, owner: int, key: str) -> str:
        path = self._paths[owner]
        return f"{path}.{key}" if path else key

    def _other_names(self, owners: Owners) -> str | None:
        """Return which is there that was not, or the other way round."""
        for i, (owner, known) in enumerate(zip(owners, self._keys, strict=True)):
            keys, words = list(owner), self._kinds[i].strip("_")
            if keys == known:
                continue
            for key in owner.keys() - set(known):
                return f"'{self._name(i, key)}' was not among the {words}"
            for key in set(known) - owner.keys():
                return f"'{self._name(i, key)}' is not among the {words} any more"
            return f"the {words} beside '{self._name(i, keys[0])}' have another order"
        return None

    def _other_tensors(self, held: Sequence[Held]) -> str | None:
        """Return which is another in more than its values."""
        names = [self._name(i, key) for i, keys in enumerate(self._keys) for key in keys]
        firsts = _firsts(held)
        for i, (name, was, tensor) in enumerate(zip(names, self._outlines, held, strict=True)):
            if was is None or tensor is None:
                if was is not None:
                    return f"'{name}' is None now"
                if tensor is not None:
                    return f"'{name}' was None and is a tensor now"
                continue
            if (differs := was.differs_from(TensorOutline.of(tensor))) is not None:
                return f"'{name}' {differs}"
            was_alone = self._firsts[i] == i
            # Those that are sent to the meta device are parted.
            if firsts[i] != self._firsts[i] and (was_alone or tensor.device.type != "meta"):
                other = names[firsts[i] if was_alone else self._firsts[i]]
                return f"'{name}' and '{other}' are {'one' if was_alone else 'two'} now"
        return None


def _held(owners: Owners) -> list[Held]:
    return [tensor for owner in owners for tensor in owner.values()]


def _firsts(held: Sequence[Held]) -> list[int]:
    """Return for each where the same object stands first."""
    places: dict[int, int] = {}
    return [
        i if tensor is None else places.setdefault(id(tensor), i) for i, tensor in enumerate(held)
    ]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether torch compares all that counts of a tensor without asking its class."""
    is_known = type(tensor) in _PLAIN or "_cover" in vars(tensor)
    return is_known and tensor.layout is torch.strided and not tensor.is_nested
