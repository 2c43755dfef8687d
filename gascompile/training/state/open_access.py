"""Open access: what Python asks of an open tensor beside ops, such as its bytes, a copy of it or its pickle.

What only looks at shapes goes through; ops end in ``OpenTensor.__torch_dispatch__``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gascompile.core.errors import OpenStepError
from gascompile.training.state.open_tensors import (
    Cover,
    OpenTensor,
    cover_of,
    plain,
    refusal,
    values_of,
)

_T: Any = torch.Tensor
_REFUSED = {
    _T.data_ptr: "data_ptr()",
    _T.untyped_storage: "the storage",
    _T.storage: "the storage",
    _T._typed_storage: "the storage",
    _T.set_: "set_()",
    _T.resize_: "resize_()",
    _T.resize_as_: "resize_as_()",
    _T.share_memory_: "share_memory_()",
    _T.register_hook: "a gradient hook",
    _T.register_post_accumulate_grad_hook: "a gradient hook",
    _T.__dlpack__: "a view by DLPack",
}


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a call with open tensors among its arguments returns.

    Raises:
        OpenStepError: there is no answer; says what to do instead.
    """
    if func in _REFUSED:
        raise refusal(_REFUSED[func], (args, kwargs))
    own = _OWN.get(func)
    if own is not None and isinstance(args[0], OpenTensor):
        return own(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _numpy(tensor: OpenTensor, *args: Any, **kwargs: Any) -> Any:
    array = plain(tensor).numpy(*args, **kwargs)
    # A copy: who writes to it would not change the model.
    array.flags.writeable = False
    return array


def _array(tensor: OpenTensor, *args: Any, **kwargs: Any) -> Any:
    array = values_of(tensor).__array__(*args, **kwargs)
    array.flags.writeable = False
    return array


def _set_data(tensor: OpenTensor, value: torch.Tensor) -> None:
    """Let a tensor have the value of another; views of it that somebody has keep the old one, as in plain torch."""
    with torch._C.DisableTorchFunctionSubclass():
        cover = cover_of(tensor)
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise OpenStepError(
                f"'{cover.name}' is planned for as {tensor.dtype} {list(tensor.shape)} and cannot become "
                f"{value.dtype} {list(value.shape)}; close the step, change the model and compile a new one"
            )
        given = cover_of(value) if isinstance(value, OpenTensor) else None
        is_alike = (value.stride(), value.storage_offset()) == (
            tensor.stride(),
            tensor.storage_offset(),
        )
        if given is cover and is_alike and "_viewed" not in vars(tensor):
            return
        _require_own_memory(tensor, given)
        cover.part()
        with torch.no_grad():
            torch.ops.aten.copy_.default(tensor, value.detach())
        viewed = vars(value).get("_viewed") if given is not None else None
        if viewed is not None and viewed.home is cover and is_alike:
            cover.join(viewed)
        else:
            cover.follow(value)


def _require_own_memory(tensor: OpenTensor, given: Cover | None) -> None:
    """Refuse data after which tensors would share memory, or no longer share it, that steps treat otherwise."""
    cover = cover_of(tensor)
    if "_viewed" in vars(tensor):
        said = "is a view here, which cannot get other memory"
    elif cover.is_shared:
        said = (
            "shares its memory with other tensors of the model, which would not follow it any more"
        )
    elif given is not None and not given.is_closed:
        said = f"would have one memory with '{given.name}'"
    else:
        return
    raise OpenStepError(
        f"'{cover.name}' {said}: write p.copy_(value) under torch.no_grad() instead of p.data = value, with "
        "value = q.detach().clone() to swap two, or call close() first"
    )


def _detach(tensor: OpenTensor) -> torch.Tensor:
    # From C++ the asker is right behind __torch_function__ and answer.
    if sys._getframe(3).f_code is nn.Parameter.__new__.__code__ and isinstance(
        tensor, nn.Parameter
    ):
        raise OpenStepError(
            f"a new parameter of '{cover_of(tensor).name}', as parametrizations make it, would have the memory of one "
            f"that is with {cover_of(tensor).holder}: make it before compile_step, or call close() first"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def _set_gradient(tensor: OpenTensor, value: torch.Tensor | None) -> None:
    if value is not None:
        raise OpenStepError(
            f"the gradient of '{cover_of(tensor).name}' would never be used: a training step is open, which computes "
            "its own. Put what it is of into loss_fn, or close the step"
        )


_OWN: dict[Any, Callable[..., Any]] = {
    _T.numpy: _numpy,
    _T.__array__: _array,
    _T.tolist: lambda tensor: plain(tensor).tolist(),
    _T.__format__: lambda tensor, spec: plain(tensor).__format__(spec),
    _T.detach: _detach,
    _T.data.__set__: _set_data,
    _T.grad.__set__: _set_gradient,
}
