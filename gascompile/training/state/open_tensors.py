"""Open tensors: what a model's parameters and buffers are while a step, or a compiled model, has their values.

They have their shapes, and no memory. An op that reads one gets a copy of its value from wherever it is; one that
writes to it, or to a view of it, has the value written back. What cannot be answered so raises ``OpenStepError``:
an open tensor never stands for values that are not the model's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.core.errors import OpenStepError
from gascompile.core.waiting import life
from gascompile.training.state.open_guard import GUARD

Change = Callable[[torch.Tensor], Any]
"""A view, of a tensor that may be on the meta device."""
_HIDDEN = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
"""Ops that write to arguments of which their schema does not say so."""
_HIDDEN_ARGUMENTS = ("running_mean", "running_var")


class Cover:
    """The value of one tensor of a model, as the step that has it knows it."""

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        like: torch.Tensor,
        value: Callable[[], torch.Tensor],
        assign: Callable[[torch.Tensor], None],
        holder: str = "an open training step",
        wait: Callable[[], object] = bool,
        settle: Callable[[], object] = bool,
        is_shared: bool = False,
    ) -> None:
        """Change nothing yet.

        Args:
            name: in the model.
            tensor: the model's own, which has values again once the cover is lifted.
            like: has its layout alone.
            value: returns a copy.
            assign: takes a new value.
            holder: who has the value, as errors call it.
            wait: blocks until the value is back, where nobody has the holder any more.
            settle: blocks while another thread puts the value back, whose asker was interrupted.
            is_shared: whether other tensors of the model lie in its memory.
        """
        self.is_shared = is_shared
        self.holder, self.life, self.wait, self.settle = holder, life(), wait, settle
        self.name, self.tensor = name, tensor
        self.like, self._value, self._assign = like, value, assign
        self.own = type(tensor)
        self._shell: torch.Tensor | None = None
        """Has the tensor's own memory while the step is open."""
        self._copy: weakref.ref[torch.Tensor] | None = None
        self._viewed: weakref.ref[Viewed] | None = None
        self._source: tuple[weakref.ref[torch.Tensor], int] | None = None
        """Has the same memory in plain torch."""
        self._pin: weakref.ref[torch.Tensor] | None = None
        """``swap_tensors`` refuses tensors that have one; it would leave the model with the value of another."""
        self._memory: torch.Tensor | None = None
        """What views see once the step is closed."""
        self.is_closed = self.allows_steps = False

    def put(self) -> None:
        """Let the model's tensor be open."""
        kind = _open_kind(self.own)
        shell = _made(kind, self, self.like, (), requires_grad=self.tensor.requires_grad)
        self._swap(shell, kind, self.own)
        self.tensor.__dict__.update(_cover=self, _views=())
        self._shell, self._pin = shell, weakref.ref(self.tensor)

    def lift(self) -> None:
        """Let it be as it was, but for what it requires."""
        shell, self._shell, self._pin = self._shell, None, None
        if shell is None:
            return
        with torch._C.DisableTorchFunctionSubclass():
            requires_grad = self.tensor.requires_grad
        for key in ("_cover", "_views"):
            self.tensor.__dict__.pop(key, None)
        self._swap(shell, self.own, _open_kind(self.own))
        if self.tensor.requires_grad != requires_grad:
            self.tensor.requires_grad_(requires_grad)

    @property
    def behind(self) -> torch.Tensor:
        """What has the tensor's own memory."""
        return self.tensor if self._shell is None else self._shell

    def give_back(self, value: torch.Tensor) -> None:
        """Lift it from a tensor that has a value from then on: nobody sees one without."""
        self.behind.data = value
        self.close()

    def close(self) -> None:
        """Lift it for good; views see the memory that the tensor has now, as in plain torch."""
        self.lift()
        if self.viewed_now() is not None and not self.is_closed:
            self._memory = self.tensor.detach()
        self.is_closed = True

    def viewed_now(self) -> Viewed | None:
        """Return what views that somebody has are views of."""
        return self._viewed() if self._viewed is not None else None

    def viewed(self) -> Viewed:
        """Return what a new view is a view of."""
        self._viewed = weakref.ref(viewed := self.viewed_now() or Viewed(self))
        return viewed

    def part(self) -> None:
        """Let views that somebody has keep the value of now, apart from the tensor."""
        self._source = None
        if (viewed := self.viewed_now()) is not None:
            kept = self.value().detach()
            viewed.cover = Cover(
                self.name, kept, self.like, kept.detach, lambda _: None, self.holder
            )
            viewed.cover.is_closed = True
            self._viewed = None

    def join(self, viewed: Viewed) -> None:
        """Let views that were parted see the tensor again."""
        viewed.cover, self._viewed = self, weakref.ref(viewed)

    def follow(self, source: torch.Tensor) -> None:
        """Take note of who would have the same memory in plain torch."""
        if not source.is_inference():
            self._source = weakref.ref(source), source._version

    def require_followed(self) -> None:
        """Refuse a value that somebody has changed past the step.

        Raises:
            OpenStepError: a tensor that was assigned to ``data`` was written to.
        """
        if self._source is None:
            return
        given, version = self._source[0](), self._source[1]
        if given is not None and given._version != version:
            raise OpenStepError(
                f"what was assigned to the data of '{self.name}' was written to since, and {self.holder} has the older "
                "value: in plain torch both have one memory. Assign it to the data again"
            )

    def _swap(self, shell: torch.Tensor, own: type, others: type) -> None:
        torch._C._swap_tensor_impl(self.tensor, shell)
        self.tensor.__class__, shell.__class__ = own, others

    @property
    def is_open(self) -> bool:
        """Return whether the step has the value."""
        return self._shell is not None

    def value(self) -> torch.Tensor:
        """Return a copy; the model's own memory, once the step is closed."""
        if self.is_closed:
            memory = None if isinstance(self.tensor, OpenTensor) else self._memory
            return self.tensor.detach() if memory is None else memory
        self.require_followed()
        return self._value()

    def shared_copy(self) -> torch.Tensor:
        """Return a copy that stays the same for all who ask, until somebody writes to the tensor."""
        shared = self._copy() if self._copy is not None else None
        if shared is None or shared._version:
            shared = self.value().detach()
            self._copy = weakref.ref(shared)
        return shared

    def assign(self, value: torch.Tensor) -> None:
        """Take a new value over."""
        self.forget_copy()
        if not self.is_closed:
            self._assign(value)

    def forget_copy(self) -> None:
        """Take note that the value changes."""
        self._copy = None


class Viewed:
    """What views are views of: a tensor's value, or what was its value before the tensor got other data."""

    __slots__ = ("__weakref__", "cover", "home")

    def __init__(self, cover: Cover) -> None:
        self.cover = self.home = cover


@dataclass(slots=True)
class _Values:
    """Copies that one op works on, and who they are of."""

    wholes: dict[Cover, torch.Tensor] = field(default_factory=dict)
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    """By ``id`` of the open tensor."""
    of: dict[int, OpenTensor] = field(default_factory=dict)
    """By ``id`` of the copy."""

    def real(self, tensor: OpenTensor) -> torch.Tensor:
        """Return what stands for an open tensor in the op."""
        if id(tensor) not in self.made:
            cover = cover_of(tensor)
            whole = self.wholes.setdefault(cover, cover.value())
            self.made[id(tensor)] = _viewed(whole, tensor._views)
            self.of[id(self.made[id(tensor)])] = tensor
        return self.made[id(tensor)]


class OpenTensor(torch.Tensor):
    """A tensor, or a view of one, whose value a step has."""

    _cover: Cover
    """Of a tensor of a model; views have ``_viewed``."""
    _viewed: Viewed
    _views: tuple[Change, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            memo[id(self)] = plain(self)
        copied: torch.Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]  # torch's has no types
        return repr(plain(self))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        from gascompile.training.state.open_access import answer

        for given in pytree.tree_leaves((args, kwargs)):
            if isinstance(given, OpenTensor) and vars(given).keys() & {"_cover", "_viewed"}:
                cover_of(given).settle()
        return answer(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch has it typed as if it took no op
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.inplace_view in func.tags:
            raise refusal(str(func), args)
        if _is_view(func) and isinstance(args[0], OpenTensor):
            return _view(func, args, kwargs)
        values = _Values()
        written = [cover_of(t) for t in _written(func, args, kwargs)]
        real = pytree.tree_map_only(OpenTensor, values.real, (args, kwargs))
        result = func(*real[0], **real[1])
        for cover in dict.fromkeys(written):
            cover.assign(values.wholes[cover])
        return pytree.tree_map_only(torch.Tensor, lambda t: values.of.get(id(t), t), result)


_kinds: dict[type, type[OpenTensor]] = {torch.Tensor: OpenTensor}


def _open_kind(own: type) -> type[OpenTensor]:
    """Return the class of open tensors that are ``own`` to all who ask."""
    if own not in _kinds:
        _kinds[own] = type(f"Open{own.__name__}", (OpenTensor, own), {"__module__": __name__})
    return _kinds[own]


def _made(
    kind: type[OpenTensor],
    place: Cover | Viewed,
    like: torch.Tensor,
    views: tuple[Change, ...],
    *,
    requires_grad: bool = False,
) -> OpenTensor:
    opened: OpenTensor = torch.Tensor._make_wrapper_subclass(
        kind,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        layout=like.layout,
        device=torch.device("cpu"),
        requires_grad=requires_grad,
        _extra_dispatch_keys=GUARD,
    )
    # Code that goes past the ops, such as an extension, gets an error in the place of no memory.
    torch._C._set_throw_on_mutable_data_ptr(opened)
    opened._views = views
    if isinstance(place, Cover):
        opened._cover = place
    else:
        opened._viewed = place
    return opened


def cover_of(tensor: OpenTensor) -> Cover:
    """Return who knows the value."""
    viewed: Viewed | None = vars(tensor).get("_viewed")
    return tensor._cover if viewed is None else viewed.cover


def _viewed(whole: torch.Tensor, views: tuple[Change, ...]) -> torch.Tensor:
    for view in views:
        whole = view(whole)
    return whole


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


def _view(func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """Return open views: what is written to them is written to the whole."""
    tensor, *rest = args
    outline = _viewed(cover_of(tensor).like, tensor._views)
    place = vars(tensor).get("_viewed") or tensor._cover.viewed()
    viewed = func(outline, *rest, **kwargs)
    if isinstance(viewed, torch.Tensor):
        views = (*tensor._views, lambda whole: func(whole, *rest, **kwargs))
        return _made(OpenTensor, place, viewed, views)

    def part(number: int) -> Change:
        return lambda whole: func(whole, *rest, **kwargs)[number]

    return [
        _made(OpenTensor, place, like, (*tensor._views, part(number)))
        for number, like in enumerate(viewed)
    ]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[OpenTensor]:
    """Return the open tensors that an op writes to."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    given.update(kwargs)
    hidden = func.overloadpacket.__name__ in _HIDDEN and given.get("training", True)
    written: list[OpenTensor] = []
    for argument in func._schema.arguments:
        value = given.get(argument.name)
        alias = argument.alias_info
        if (alias and alias.is_write) or (hidden and argument.name in _HIDDEN_ARGUMENTS):
            written += [t for t in pytree.tree_leaves(value) if isinstance(t, OpenTensor)]
    return written


def outline(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a trace may take for a tensor from elsewhere; of an open one, memory that nothing touches."""
    if not isinstance(tensor, OpenTensor):
        return tensor.detach()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def behind(tensor: torch.Tensor) -> torch.Tensor:
    """Return what has a tensor's own memory: values that it gets show once the tensor is not open any more."""
    cover: Cover | None = vars(tensor).get("_cover")
    return tensor if cover is None else cover.behind


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as ops of a plan take it; an open one is copied."""
    if not isinstance(tensor, OpenTensor):
        return tensor
    with torch.no_grad():
        values: torch.Tensor = torch.ops.aten.clone.default(tensor)
    return values


def refusal(what: str, args: Any) -> OpenStepError:
    """Return the error for something that an open tensor cannot answer."""
    covers = [cover_of(t) for t in pytree.tree_leaves(args) if isinstance(t, OpenTensor)]
    name = f"'{covers[0].name}'" if covers else "a parameter"
    holder = covers[0].holder if covers else "an open training step"
    return OpenStepError(
        f"{what} of {name}: its values are with {holder}. Read them by state_dict() of that or of the model, write "
        "them by in-place ops or load_state_dict, or call close() of that first"
    )


def plain(tensor: OpenTensor) -> torch.Tensor:
    """Return a copy that is a plain tensor, or a plain parameter."""
    value = values_of(tensor)
    if not isinstance(tensor, nn.Parameter):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        requires_grad = tensor.requires_grad
    return nn.Parameter(value, requires_grad=requires_grad)
