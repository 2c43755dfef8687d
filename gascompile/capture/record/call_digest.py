"""Call digest: what a model's code asks torch to compute, call by call, to compare two runs of it.

A run on fake tensors takes a third of the time of one that makes a graph, and is digested by itself: what torch does
within one of its functions follows from the function, what it is given, and modes that are the same in both runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.core.content import content_of

_PLAIN = (
    int, float, complex, bool, str, bytes, slice, type(None), type(...), torch.Size, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip
"""Types whose words say all of a value."""


_DEVICES = ("cpu", "cuda")


class CallDigest:
    """Of one run; unknown as soon as something is called that it cannot describe."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._digest = hashlib.blake2b(digest_size=16)
        self._known: dict[int, tuple[torch.Tensor, str]] = {}
        """By identity; kept, so that no other tensor takes the place of one."""
        self._num_calls = 0
        self._is_known = True
        self._num_modes = 0

    @property
    def value(self) -> str | None:
        """What says the same of two runs only if they compute the same; ``None`` where nobody can say."""
        return self._digest.hexdigest() if self._is_known and self._num_calls else None

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Give names to a model's tensors and to those it is called with."""
        self._num_modes = torch._C._len_torch_dispatch_stack()
        leaves = enumerate(pytree.tree_leaves((args, dict(kwargs))))
        named = [*module.named_parameters(), *module.named_buffers()]
        for path, part in module.named_modules():
            named += [(f"{path}.{k}", v) for k, v in vars(part).items() if torch.is_tensor(v)]
        named += [(f"input {n}", leaf) for n, leaf in leaves if isinstance(leaf, torch.Tensor)]
        for name, tensor in named:
            self._known.setdefault(id(tensor), (tensor, f"%{name}"))

    def calls(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Take note of a call before it is made."""
        if not self._is_known:
            return
        name = _name_of(func)
        try:
            operands = self._operands((args, dict(kwargs)))
        except _UnknownValueError:
            name = None
        if name is None or torch._C._len_torch_dispatch_stack() != self._num_modes:
            self.lose()
            return
        self._num_calls += 1
        self._digest.update(repr((name, operands, _modes())).encode())

    def returns(self, returned: object) -> None:
        """Take note of what the last call has returned."""
        if self._is_known:
            for number, leaf in enumerate(pytree.tree_leaves(returned)):
                if isinstance(leaf, torch.Tensor):
                    # Where one run returns what it was given, another may return an alias of it.
                    self._known[id(leaf)] = leaf, f"%{self._num_calls}.{number}"
                    self._digest.update(repr((leaf.dtype, tuple(leaf.shape))).encode())

    def end(self, returned: object) -> None:
        """Take note of what the model has returned."""
        leaves, spec = pytree.tree_flatten(returned)
        try:
            values = self._operands(leaves)
        except _UnknownValueError:
            self.lose()
        else:
            self._digest.update(repr((spec, values)).encode())

    def lose(self) -> None:
        """Take note that something ran of which nothing is known."""
        self._is_known = False
        self._known.clear()

    def _operands(self, values: Any) -> Any:
        return pytree.tree_map(self._operand, values)

    def _operand(self, value: object) -> object:
        if isinstance(value, torch.Tensor):
            known = self._known.get(id(value))
            if known is None:
                known = self._known[id(value)] = value, f"={_content(value)}"
            return _Name(known[1])
        if type(value) not in _PLAIN:
            raise _UnknownValueError
        return value


class _UnknownValueError(Exception):
    """Nobody knows where a tensor comes from, or what another value is."""


class _Name:
    """A tensor among operands; a string there is another thing."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _name_of(func: Any) -> str | None:
    """Return the name of a function of torch's, with that of the attribute that it reads or sets; ``None`` without one.

    Functions that others make share their makers' names for them.
    """
    name = getattr(func, "__qualname__", None) or getattr(func, "__name__", None)
    if name is not None and "<" in name:
        return None
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = str(func)
    of = getattr(func, "__self__", None)
    return name and f"{getattr(func, '__module__', '')}.{name} {getattr(of, '__name__', '')}"


def _modes() -> object:
    """Return what is set by contexts that are no functions, and decides in which format torch computes."""
    return (
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES],
    )


def _content(value: torch.Tensor) -> str:
    """Return a digest of a tensor that was there before.

    Raises:
        _UnknownValueError: it has no values.
    """
    # What a trace has put in the place of a tensor is of a class of its own.
    is_plain = type(value) in (torch.Tensor, nn.Parameter, nn.Buffer)
    if not is_plain or value.is_meta or value.layout is not torch.strided:
        raise _UnknownValueError
    try:
        raw = content_of(value)
    except RuntimeError as error:
        raise _UnknownValueError from error
    outline = value.dtype, tuple(value.shape), value.stride()
    return f"{outline} {hashlib.blake2b(raw, digest_size=16).hexdigest()}"
