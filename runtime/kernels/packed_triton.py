"""Products with packed weights on a GPU, by the Triton kernels: what ``formats.ops`` calls for tensors of a GPU."""

from __future__ import annotations

import torch

from gascompile.formats import ops as format_ops
from gascompile.formats.layout import FORMS
from gascompile.formats.packings import Packing
from gascompile.runtime import kernels
from gascompile.runtime.kernels.checks import DTYPES


class TritonPackedKernels:
    """The launchers behind the questions of ``formats.ops``; each answer says whether the work was done."""

    def linear(
        self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, form: str, group: int
    ) -> bool:
        """Write ``x @ decoded(weight).T`` into ``out`` for few rows of ``x``: the packed bytes are read once."""
        is_few = 1 <= x.shape[0] <= kernels.MAX_ROWS and x.stride(-1) == 1
        if not (is_few and out.is_contiguous() and _is_known(x, weight, form)):
            return False
        kernels.linear(x, weight, form=form, group=group, out=out)
        return True

    def linear_by_blocks(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        form: str,
        group: int,
        scratch: torch.Tensor,
    ) -> bool:
        """Unpack a block of rows after the other into ``scratch``, ``[some rows, columns]``, and multiply by it."""
        if not _is_known(x, weight, form):
            return False
        for begin in range(0, weight.shape[0], scratch.shape[0]):
            rows = weight[begin : begin + scratch.shape[0]]
            block = scratch[: rows.shape[0]]
            kernels.unpack(rows, block, form=form, group=group)
            torch.mm(x, block.t(), out=out[:, begin : begin + rows.shape[0]])
        return True

    def decode(self, out: torch.Tensor, weight: torch.Tensor, form: str, group: int) -> bool:
        """Write the values of packed rows into ``out``, ``[rows, columns]``."""
        if out.dim() != 2 or not out.is_contiguous() or not _is_known(out, weight, form):
            return False
        kernels.unpack(weight, out, form=form, group=group)
        return True

    def unpack(
        self,
        out: torch.Tensor,
        codes: torch.Tensor,
        zeros: torch.Tensor | int,
        scales: torch.Tensor,
        groups: torch.Tensor | None,
        packing: Packing,
    ) -> bool:
        """Leave parts that lie apart to plain torch."""
        del out, codes, zeros, scales, groups, packing
        return False


def _is_known(x: torch.Tensor, weight: torch.Tensor, form: str) -> bool:
    """Return whether the kernels can read ``weight``, where the drive or the plan put it, and compute in the dtype."""
    is_aligned = weight.data_ptr() % 4 == 0 and weight.stride(0) % 4 == 0
    return form in FORMS and x.dtype in DTYPES and weight.stride(1) == 1 and is_aligned


def install() -> None:
    """Let all products with packed weights on a GPU in this process use the kernels."""
    format_ops.use_kernels(TritonPackedKernels(), device="cuda")
