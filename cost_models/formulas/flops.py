"""FLOPs of ops that torch's own counter leaves out, and which ops compute too much to be costed by their bytes.

A fused multiply-add counts as two. Factorizations use the leading term of the textbook algorithm. An op whose
name says that it multiplies or factorizes and that has no formula, torch's or one of these, is *unknown*:
what it takes is not in its bytes, so its user is told.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gascompile.formats.ops import transfer_rows

_Formula = Callable[[Sequence[Any], Sequence[Any]], int]
"""From an op's arguments and its results to its FLOPs."""

_HEAVY = re.compile(
    r"(^|_)(mm|\w*mm|mv|matmul|gemm|conv\w*|convolution\w*|linear|attention|rnn|lstm|gru|dot|einsum|fft|dft|svd\w*|"
    r"solve\w*|qr|lu|cholesky|eigh?\w*|inv|inverse|det|slogdet|lstsq|cdist|pdist|trilinear|bilinear|exp_matrix|ormqr|"
    r"orgqr|householder|moe|ssm|scan|matrix_exp|matrix_power|pinv)(_|$)"
)
_LIGHT = re.compile(
    r"upsample|grid_sampl|unpack|_lu_with_info|det_helper|choose_qparams|linspace|use_cudnn|_convert_|reorder|"
    r"resize|state_grads|fftfreq|fftshift|thnn_|slice_inverse|flatten_weight|_transpose|_nnpack_available|fused_sdp_choice|_amp_|nested_get|empty|zero"
)
"""Names that contain a heavy word and mean something else."""


def flops_of(func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> int | None:
    """Return the floating-point operations of one call; ``None`` where no formula covers the op."""
    # Late, as this loads Triton, which runs do without.
    from torch.utils.flop_counter import flop_registry

    packet = func.overloadpacket
    ours = _FORMULAS.get(str(packet).removeprefix("aten."))
    if ours is None:
        formula = flop_registry.get(packet)
        return None if formula is None else int(formula(*args, **kwargs, out_val=result))
    given = [*args, *kwargs.values()]
    results = result if isinstance(result, (tuple, list)) else (result,)
    return max(0, int(ours(given, [r for r in results if isinstance(r, torch.Tensor)])))


def is_heavy(func: Any) -> bool:
    """Whether the op's name says that it computes far more than its bytes show."""
    name = str(func.overloadpacket).rpartition(".")[2]
    return bool(_HEAVY.search(name)) and not _LIGHT.search(name)


def _product(args: Sequence[Any], results: Sequence[Any]) -> int:
    """Every value of the result is an inner product over the last dimension of the first argument."""
    return 2 * int(results[0].numel()) * int(args[0].shape[-1])


def _added_product(args: Sequence[Any], results: Sequence[Any]) -> int:
    return _product(args[1:], results)


def _added_batches(args: Sequence[Any], results: Sequence[Any]) -> int:
    return 2 * int(args[1].numel()) * int(args[2].shape[-1])


def _grouped(args: Sequence[Any], results: Sequence[Any]) -> int:
    """Groups share out the rows, the columns or the inner dimension, whichever their matrices have in one."""
    left, right = args[0], args[1]
    shared = int(left.shape[0]) if left.dim() == 3 and right.dim() == 2 else 1
    return 2 * int(left.numel()) * int(right.shape[-1]) // shared


def _inner(args: Sequence[Any], results: Sequence[Any]) -> int:
    return 2 * int(args[0].numel())


def _outer(args: Sequence[Any], results: Sequence[Any]) -> int:
    return 2 * int(results[0].numel())


def _convolution(args: Sequence[Any], results: Sequence[Any]) -> int:
    return 2 * int(results[0].numel()) * int(args[1].numel()) // max(1, int(args[1].shape[0]))


def _transposed(args: Sequence[Any], results: Sequence[Any]) -> int:
    return 2 * int(args[0].numel()) * int(args[1].numel()) // max(1, int(args[1].shape[0]))


def _packed_product(args: Sequence[Any], results: Sequence[Any]) -> int:
    # The weight is packed; its rows are those of the product.
    return 2 * int(args[0].numel()) * transfer_rows(args[1], args[3], int(args[0].shape[-1]))


def _attention(args: Sequence[Any], results: Sequence[Any]) -> int:
    query, key, value = args[:3]
    from torch.utils.flop_counter import sdpa_flop_count

    return int(sdpa_flop_count(query.shape, *_for_each_head(query, key, value)))


def _attention_backward(args: Sequence[Any], results: Sequence[Any]) -> int:
    grad, query, key, value = args[:4]
    from torch.utils.flop_counter import sdpa_backward_flop_count

    return int(
        sdpa_backward_flop_count(grad.shape, query.shape, *_for_each_head(query, key, value))
    )


def _for_each_head(query: torch.Tensor, *shared: torch.Tensor) -> Iterator[list[int]]:
    """Give the shapes of keys and values as if no heads shared them, which is all that torch 2.11 counts."""
    for of in shared:
        yield [*of.shape[:-3], *query.shape[-3:-2], *of.shape[-2:]]


def _layer_of_rnn(args: Sequence[Any], results: Sequence[Any]) -> int:
    steps = int(args[0].numel()) // int(args[0].shape[-1])
    return 2 * steps * sum(int(w.numel()) for w in args[1:5] if w.dim() == 2)


def _cudnn_rnn(args: Sequence[Any], results: Sequence[Any]) -> int:
    steps = int(args[0].numel()) // int(args[0].shape[-1])
    return 2 * steps * sum(int(w.numel()) for w in args[1] if w.dim() > 1)


def _distances(args: Sequence[Any], results: Sequence[Any]) -> int:
    return 3 * int(results[0].numel()) * int(args[0].shape[-1])


def _trilinear(args: Sequence[Any], results: Sequence[Any]) -> int:
    operands = [
        _expanded(value, unsqueezed) for value, unsqueezed in zip(args[:3], args[3:6], strict=True)
    ]
    return 3 * math.prod(int(max(sizes)) for sizes in zip(*operands, strict=True))


def _expanded(value: torch.Tensor, at: Sequence[int]) -> list[int]:
    sizes = [int(size) for size in value.shape]
    for dim in at:
        sizes.insert(dim, 1)
    return sizes


def _transform(args: Sequence[Any], results: Sequence[Any]) -> int:
    values = max(int(args[0].numel()), int(results[0].numel()))
    dims = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    sides = [max(int(args[0].shape[d]), int(results[0].shape[d])) for d in dims]
    return int(5 * values * math.log2(max(2, math.prod(sides))))


def _factorized(factor: float) -> _Formula:
    """Return ``factor * m * n * min(m, n)`` per matrix."""

    def flops(args: Sequence[Any], results: Sequence[Any]) -> int:
        rows, columns = (int(size) for size in args[0].shape[-2:])
        return int(factor * args[0].numel() * min(rows, columns))

    return flops


def _solved(factor: float, matrix: int = 0, right: int = 1, solves: int = 2) -> _Formula:
    """Return the factorization and, per right-hand side, so many triangular solves."""

    def flops(args: Sequence[Any], results: Sequence[Any]) -> int:
        side = int(args[matrix].shape[-1])
        return int(factor * args[matrix].numel() * side + solves * side * args[right].numel())

    return flops


_FORMULAS: dict[str, _Formula] = {
    "gascompile.wire_linear": _packed_product,
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped),
    **dict.fromkeys(
        (
            "_scaled_mm_v2",
            "_int_mm",
            "_weight_int8pack_mm",
            "_weight_int4pack_mm",
            "_weight_int4pack_mm_for_cpu",
            "_weight_int4pack_mm_with_scales_and_zeros",
            "_dyn_quant_matmul_4bit",
            "mkldnn_linear",
            "linear",
            "matmul",
            "mv",
        ),
        _product,
    ),
    **dict.fromkeys(("addmv", "_addmm_activation"), _added_product),
    **dict.fromkeys(("addmv_",), _added_product),
    "addbmm": _added_batches,
    **dict.fromkeys(("dot", "vdot", "linalg_vecdot"), _inner),
    **dict.fromkeys(("addr", "ger", "outer"), _outer),
    **dict.fromkeys(
        (
            "mkldnn_convolution",
            "slow_conv3d_forward",
            "slow_conv_dilated2d",
            "slow_conv_dilated3d",
            "conv_depthwise3d",
            "_conv_depthwise2d",
            "conv1d",
            "conv2d",
            "conv3d",
        ),
        _convolution,
    ),
    **dict.fromkeys(("slow_conv_transpose2d", "slow_conv_transpose3d"), _transposed),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_attention_math_for_mps",
            "scaled_dot_product_attention",
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_fused_attention_overrideable_backward",
        ),
        _attention_backward,
    ),
    "mkldnn_rnn_layer": _layer_of_rnn,
    "mkldnn_rnn_layer_backward": lambda args, results: 2 * _layer_of_rnn(args, results),
    "_cudnn_rnn": _cudnn_rnn,
    "_cudnn_rnn_backward": lambda args, results: 2 * _cudnn_rnn(args, results),
    **dict.fromkeys(("_cdist_forward", "cdist", "_pdist_forward", "_euclidean_dist"), _distances),
    "_cdist_backward": lambda args, results: 2 * _distances(args[1:], [args[0]]),
    "_pdist_backward": lambda args, results: 2 * _distances(args[1:], [args[0]]),
    "_trilinear": _trilinear,
    **dict.fromkeys(("_fft_c2c", "_fft_r2c", "_fft_c2r"), _transform),
    **dict.fromkeys(("linalg_cholesky_ex", "cholesky", "cholesky_inverse"), _factorized(1 / 3)),
    **dict.fromkeys(
        ("linalg_lu_factor_ex", "linalg_lu", "_linalg_det", "_linalg_slogdet"), _factorized(2 / 3)
    ),
    **dict.fromkeys(("linalg_inv_ex", "linalg_ldl_factor_ex", "inverse"), _factorized(2.0)),
    **dict.fromkeys(
        ("linalg_qr", "geqrf", "linalg_householder_product", "orgqr"), _factorized(2.0)
    ),
    **dict.fromkeys(("linalg_matrix_exp", "matrix_exp"), _factorized(16.0)),
    **dict.fromkeys(("_linalg_eigh", "linalg_eigvalsh"), _factorized(9.0)),
    **dict.fromkeys(("linalg_eig", "linalg_eigvals", "_linalg_eigvals"), _factorized(25.0)),
    "_linalg_svd": _factorized(22.0),
    "_linalg_solve_ex": _solved(2 / 3),
    "linalg_lstsq": _solved(2.0),
    **dict.fromkeys(("linalg_lu_solve", "linalg_ldl_solve"), _solved(0.0, right=2)),
    "linalg_solve_triangular": _solved(0.0, solves=1),
    "triangular_solve": _solved(0.0, matrix=1, right=0, solves=1),
    "cholesky_solve": _solved(0.0, matrix=1, right=0),
    "ormqr": _solved(0.0, right=2),
}
