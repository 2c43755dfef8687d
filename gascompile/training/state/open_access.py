"""Open access: what Python asks of an open tensor beside ops, such as its bytes, a copy of it or its pickle.

What only looks at shapes goes through; ops end in ``OpenTensor.__torch_dispatch__``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gascompile.core.errors import OpenStepError
from gascompile.training.state.open_tensors import OpenTensor, plain, refusal, values_of

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
    with torch._C.DisableTorchFunctionSubclass():
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise OpenStepError(
                f"'{tensor._cover.name}' is planned for as {tensor.dtype} {list(tensor.shape)} and cannot become "
                f"{value.dtype} {list(value.shape)}; close the step, change the model and compile a new one"
            )
        with torch.no_grad():
            torch.ops.aten.copy_.default(tensor, value.detach())


def _set_gradient(tensor: OpenTensor, value: torch.Tensor | None) -> None:
    if value is not None:
        raise OpenStepError(
            f"the gradient of '{tensor._cover.name}' would never be used: a training step is open, which computes its "
            "own. Put what it is of into loss_fn, or close the step"
        )


_OWN: dict[Any, Callable[..., Any]] = {
    _T.numpy: _numpy,
    _T.__array__: _array,
    _T.tolist: lambda tensor: plain(tensor).tolist(),
    _T.__format__: lambda tensor, spec: plain(tensor).__format__(spec),
    _T.data.__set__: _set_data,
    _T.grad.__set__: _set_gradient,
}
