"""Open guard: refuses ``other.data = p`` of an open ``p``: a plain tensor would have memory that is not there.

Torch's C++ asks no Python of the tensor that is assigned, only an operator whether one may have the other's memory.
Open tensors have a key of the dispatcher that no other tensor has; under that key the operator raises.
"""

from __future__ import annotations

import torch

from gascompile.core.errors import OpenStepError

GUARD = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse3) | torch._C.DispatchKeySet(
    # As the key alone has it, autocast would treat open tensors as those of another device than the host.
    torch._C.DispatchKey.AutocastCPU
)


def _refuse(other: torch.Tensor, tensor: torch.Tensor) -> bool:
    from gascompile.training.state.open_tensors import OpenTensor, cover_of

    given = tensor if isinstance(tensor, OpenTensor) else other
    name = f"'{cover_of(given).name}'" if isinstance(given, OpenTensor) else "a parameter"
    raise OpenStepError(
        f"a tensor cannot share the memory of {name}, whose value is, or was, with an open training step: write "
        "other.copy_(p) under torch.no_grad(), or other.data = p.detach().clone(), or call close() first"
    )


_library = torch.library.Library("aten", "IMPL")
_library.impl("_has_compatible_shallow_copy_type", _refuse, "AutogradPrivateUse3")
