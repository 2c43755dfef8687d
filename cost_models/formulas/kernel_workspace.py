"""What CPU kernels allocate for themselves, which no dispatcher sees: an upper bound per leaf op, in bytes.

Each rule restates an allocation of ATen's or oneDNN's CPU code, or bounds a measured one ([Empirical]).
Underestimates would break the promise of a budget, so where code paths differ the larger one counts.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gascompile.core.sizes import align_up

if TYPE_CHECKING:
    import torch

_ATTENTION_KEY_BLOCK = 512  # keys of a block of ATen's FlashAttentionKernel
_CHANNEL_BLOCK = 16
"""oneDNN's blocked layouts round channels up to this on AVX-512."""
_PLAIN_CHANNELS = 4
"""Images of up to so many channels, as colours, are convolved as they lie in memory."""
_CONVOLUTION_BYTES_PER_THREAD = 56 << 10  # [Empirical] of oneDNN, as the allocator has counted
_FLOAT_BYTES = 4  # of a number in float32
_REDUCED = ("torch.bfloat16", "torch.float16")
_SLOW_CONVOLUTIONS = ("Slow2d", "Slow3d", "SlowDilated2d", "SlowDilated3d")
_SLOW_TRANSPOSED = ("SlowTranspose2d", "SlowTranspose3d")

_CONTIGUOUS_KERNELS = {
    "aten::_softmax", "aten::_log_softmax", "aten::native_layer_norm", "aten::native_group_norm",
    "aten::cumsum", "aten::embedding",
}  # fmt: skip
_COPYING_KERNELS = {"aten::sort", "aten::topk", "aten::argsort", "aten::im2col", "aten::col2im"}
_SEVERAL_COPIES = {"aten::linalg_matrix_exp": 12, "aten::_fft_r2c": 2, "aten::_fft_c2c": 2}
"""Temporaries of the size of the input. [Empirical]"""
_MATRIX_PRODUCTS = {
    # Position of the left operand.
    "aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::linear": 0,
}  # fmt: skip


_PROVEN = frozenset(
    f"aten::{name}"
    for name in (
        "mm", "bmm", "addmm", "baddbmm", "linear", "convolution", "_convolution", "mkldnn_convolution",
        "empty", "empty_like", "empty_strided", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like",
        "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "arange", "scalar_tensor",
        "clone", "copy_", "_to_copy", "embedding", "_softmax", "_log_softmax", "native_layer_norm",
    )
)  # fmt: skip
"""Ops whose rules here hold at any size and layout; others are measured where they can be."""


def is_proven(func: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether ``kernel_workspace_bytes`` bounds what the kernel of ``func`` takes, whatever its sizes."""
    import torch

    from gascompile.formats import ops as format_ops

    # oneDNN packs reduced types as the processor likes it.
    if func._schema.name in _PROVEN and not any(_is_reduced(v) for v in inputs):
        return True
    if func in (format_ops.LINEAR, format_ops.DECODE):
        return True
    if func.namespace != "aten" or torch.Tag.pointwise not in func.tags:
        return False
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CPU"):
        # Written with other ops, which fake tensors do not show.
        return False
    dtypes = {value.dtype for value in inputs}
    return len(dtypes | {value.dtype for value in outputs} - {torch.bool}) == 1


def kernel_workspace_bytes(
    func: Any, args: Sequence[Any], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> int:
    """Return what the kernel of ``func`` allocates beside ``outputs`` on a CPU.

    Args:
        func: the overload that is called, with its positional ``args``.
        args: as the dispatcher sees them.
        inputs: all tensors among the arguments.
        outputs: all tensors of the result.
    """
    # Late: plans are made without torch, too.
    import torch

    from gascompile.formats import ops as format_ops
    from gascompile.formats.workspace import decode_workspace_bytes, linear_workspace_bytes

    if func is format_ops.LINEAR:
        x, weight, _, form, group = args
        # The product with each decoded block is one of the compute dtype.
        product_bytes = _product_bytes(x, x) if x.dim() == 2 else _product_bytes(x[:1], x[:1])
        return linear_workspace_bytes(x, weight, form, group) + product_bytes
    if func is format_ops.DECODE:
        result = outputs[0]
        return decode_workspace_bytes(
            result.numel() // args[2], args[2], args[1], args[3], result.element_size()
        )
    common = None
    if torch.Tag.pointwise in func.tags and inputs:
        common = inputs[0].dtype
        for value in inputs[1:]:
            common = torch.promote_types(common, value.dtype)
    kernel = HostKernel(func._schema.name, common, _selected_backend, func._schema.is_mutable)
    return workspace_bytes(kernel, args, inputs, outputs)


class HostKernel(NamedTuple):
    """What of a kernel its workspace depends on, beside its tensors."""

    name: str
    """Of its op, with the namespace."""
    common: Any
    """The dtype in which an element-wise kernel computes; ``None`` of others."""
    backend: Callable[[Sequence[Any]], str]
    """Torch's name of what computes a convolution of such arguments."""
    is_mutable: bool = False


def _selected_backend(args: Sequence[Any]) -> str:
    import torch

    image, weight, bias, *geometry = args[:9]
    name: str = torch._C._select_conv_backend(image, weight, bias, *geometry, None).name
    return name


def workspace_bytes(
    kernel: HostKernel,
    args: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> int:
    """Return what ``kernel_workspace_bytes`` does, of tensors of torch or what has their sizes, strides and dtypes."""
    name = kernel.name
    size_bytes = _converted_bytes(kernel, inputs, outputs)
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        return size_bytes + _attention_bytes(inputs[0], inputs[1])
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu_backward":
        return size_bytes + _attention_backward_bytes(inputs)
    if name == "aten::convolution_backward":
        return size_bytes + _convolution_backward_bytes(kernel, args, outputs)
    if "convolution" in name:
        return size_bytes + _convolution_bytes(kernel, args, inputs, outputs)
    if name in _MATRIX_PRODUCTS:
        return size_bytes + _product_bytes(*inputs[_MATRIX_PRODUCTS[name] :][:2])
    if name in ("aten::lstm", "aten::mkldnn_rnn_layer"):
        return size_bytes + _lstm_bytes(inputs, outputs)
    if name == "aten::native_batch_norm_backward":
        # [Empirical] a copy of the size of the image.
        return size_bytes + _batch_norm_bytes(inputs[1]) + _nbytes(inputs[:1])
    if name == "aten::native_layer_norm_backward":
        # Every thread's sums of the gradients of weight and bias, and operands brought into order.
        sums_bytes: int = 2 * _num_threads() * math.prod(args[2]) * max(inputs[0].element_size(), 4)
        return size_bytes + sums_bytes + _nbytes([v for v in inputs if not v.is_contiguous()])
    if name == "aten::native_group_norm_backward":
        # Two sums per sample and channel.
        per_channel = 8 * inputs[1].shape[0] * inputs[1].shape[1]
        return size_bytes + per_channel + _nbytes([v for v in inputs if not v.is_contiguous()])
    if name == "aten::native_dropout_backward":
        # The mask times the scale, in the gradient's dtype.
        return size_bytes + _nbytes(outputs)
    if name == "gascompile_dropout::native_dropout_backward":
        return size_bytes + (_nbytes(outputs) if inputs[0].stride() != inputs[1].stride() else 0)
    if "batch_norm" in name:
        return size_bytes + _batch_norm_bytes(inputs[0])
    return size_bytes + _copies_bytes(name, args, inputs, outputs)


def _copies_bytes(
    name: str, args: Sequence[Any], inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> int:
    """Return what a kernel takes that works on copies of its arguments."""
    if "upsample" in name:
        # Without channels last, nearest and linear kernels copy input and output to it and back.
        return _nbytes(inputs) + _nbytes(outputs)
    if name == "aten::_embedding_bag":
        return 4 * _nbytes(inputs[1:])
    if name == "aten::roll":
        return _nbytes(inputs) if len(args) > 2 and len(args[2]) > 1 else 0
    if "linalg" in name and "norm" not in name and name not in _SEVERAL_COPIES:
        # LAPACK works in place on column-major copies.
        return 2 * (_nbytes(inputs) + _nbytes(outputs))
    if name in _COPYING_KERNELS:
        return _nbytes(inputs)
    if name in _SEVERAL_COPIES:
        return _SEVERAL_COPIES[name] * _nbytes(inputs)
    if name in _CONTIGUOUS_KERNELS:
        return _nbytes([v for v in inputs if not v.is_contiguous()])
    return 0


def _is_reduced(value: torch.Tensor) -> bool:
    return str(value.dtype) in _REDUCED


def _num_threads() -> int:
    """Return the threads of torch's kernels; without torch the processors that this process may use."""
    loaded: Any = sys.modules.get("torch")
    return int(loaded.get_num_threads()) if loaded else len(os.sched_getaffinity(0))


def _nbytes(values: Sequence[torch.Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in values)


def _converted_bytes(
    kernel: HostKernel, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> int:
    """Return the copies of operands that element-wise kernels make to compute in one dtype."""
    common = kernel.common
    if common is None or len(inputs) < 2:
        return 0
    converted = [v for v in inputs if v.dtype != common]
    if kernel.is_mutable:
        converted += [v for v in outputs if v.dtype != common]
    return sum(value.numel() for value in converted) * int(common.itemsize)


def _attention_bytes(query: torch.Tensor, key: torch.Tensor) -> int:
    """Return the scores and outputs of one block per thread, as ATen's FlashAttentionKernel allocates them."""
    rows = query.shape[-2]
    query_block = min(256 if rows >= 768 else 64 if rows >= 192 else 32, rows)
    key_block = min(_ATTENTION_KEY_BLOCK, key.shape[-2])
    # Scores may be kept twice, in fp32 and in the reduced type of the values.
    elements = query_block * (2 * key_block + query.shape[-1] + 2)
    return 4 * elements * _num_threads()


def _attention_backward_bytes(inputs: Sequence[torch.Tensor]) -> int:
    """Return the scores and their gradients of one block per thread, and operands brought into order."""
    query, key = inputs[1:3]
    per_block = _attention_bytes(query, key)
    # The gradient of the result is copied in any case. [Empirical]
    copied = [v for v in inputs[1:] if not v.is_contiguous()]
    return 2 * per_block + _nbytes((inputs[0], *copied))


def _convolution_bytes(
    kernel: HostKernel,
    args: Sequence[Any],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> int:
    image, weight = inputs[:2]
    stride, padding, dilation, transposed, _, groups = args[3:9]
    backend = kernel.backend(args)
    positions = math.prod((image if transposed else outputs[0]).shape[2:])
    columns: int = math.prod(weight.shape[1:]) * positions
    # Slow kernels run group by group and put the results together.
    joined_bytes = _nbytes((image, weight)) + (_nbytes(outputs) if groups > 1 else 0)
    if backend in _SLOW_TRANSPOSED:
        # And a column of ones for the bias.
        columns = columns * image.shape[0] * groups + math.prod(outputs[0].shape[2:])
        return columns * image.element_size() + joined_bytes
    if backend in _SLOW_CONVOLUTIONS:
        is_pointwise = math.prod((*weight.shape[2:], *stride)) == 1 and not any(padding)
        columns *= 0 if is_pointwise else outputs[0].shape[0] * groups
        return columns * image.element_size() + joined_bytes
    result_bytes = _blocked_bytes(outputs[0])
    if transposed:
        # A deconvolution is a convolution's gradient, by columns where it is dilated or grouped.
        by_columns = max(*dilation, groups) > 1
        workers = min(_num_threads(), image.shape[0] * groups)
        columns_bytes = columns * image.element_size() * workers if by_columns else 0
        result_bytes += max(result_bytes, columns_bytes)
    is_plain = groups == 1 and not transposed and image.shape[1] <= _PLAIN_CHANNELS
    is_plain = is_plain and math.prod(weight.shape[2:]) > 1
    image_bytes = _nbytes((image,)) if is_plain else _blocked_bytes(image)
    if _is_reduced(image):
        # [Empirical] copies in fp32, as one point kernels make them.
        result_bytes, image_bytes = 2 * result_bytes, 3 * image_bytes
    weight_bytes = _blocked_weight_bytes(weight, groups, is_plain=is_plain)
    return image_bytes + weight_bytes + result_bytes + _thread_bytes(image, weight)


def _convolution_backward_bytes(
    kernel: HostKernel, args: Sequence[Any], outputs: Sequence[torch.Tensor]
) -> int:
    """Return the copies of one gradient at a time, and the weights' of every thread before they are summed."""
    gradient, image, weight = args[:3]
    forward = (image, weight, None, *args[4:10])
    once = _convolution_bytes(kernel, forward, (image, weight), (gradient,))
    return 2 * once + (_num_threads() + 1) * _nbytes((weight,)) + _nbytes(outputs[2:])


def _thread_bytes(image: torch.Tensor, weight: torch.Tensor) -> int:
    """Return oneDNN's buffers of all threads: packed columns where the convolution is a product. [Empirical]."""
    per_thread = _CONVOLUTION_BYTES_PER_THREAD
    if _is_reduced(image) or not image.is_contiguous():
        per_thread += min(math.prod(weight.shape[1:]) * 64 * weight.element_size(), 128 << 10)
    return per_thread * _num_threads()


def _blocked_bytes(value: torch.Tensor) -> int:
    channels = value.shape[1]
    return _nbytes((value,)) // max(channels, 1) * align_up(channels, _CHANNEL_BLOCK)


def _blocked_weight_bytes(weight: torch.Tensor, groups: int, *, is_plain: bool) -> int:
    if groups > 1:
        return _nbytes((weight,)) // groups * align_up(groups, _CHANNEL_BLOCK) * 2
    first, second = weight.shape[:2]
    blocked = align_up(first, _CHANNEL_BLOCK)
    blocked *= 2 * second if is_plain else align_up(second, _CHANNEL_BLOCK)
    return blocked * math.prod(weight.shape[2:]) * weight.element_size()


def _product_bytes(left: torch.Tensor, right: torch.Tensor) -> int:
    """Return the copies of operands that no matrix kernel reads, and oneDNN's packed blocks per thread."""
    copies = _nbytes([v for v in (left, right) if not _is_matrix_layout(v)])
    if not _is_reduced(left):
        return copies
    rows, depth, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    # [Empirical] per thread, with AVX2, AVX-512 and avx512_bf16: packed columns, fp32 accumulators, packed rows.
    per_thread = depth * 128 + min(rows, 256) * 2048 + (8 << 10)
    if depth > 2048 and rows > 512:
        per_thread += min(2 << 20, 5 * rows * columns)
    num_elements = math.prod(left.shape[:-1]) * columns
    return copies + max(per_thread * _num_threads(), wide_sums_bytes(num_elements))


def wide_sums_bytes(num_elements: int) -> int:
    """Return what a product in bfloat16 takes beside a result of so many elements, for its sums in ``float32``.

    oneDNN has them in registers where the processor has instructions for products in bfloat16.
    """
    features = _processor_features()
    if "avx512_bf16" in features or "avx512bw" not in features:
        return 0
    # [Empirical] With 1, 2 and 5 threads and 7 to 33,000 rows, columns and terms.
    return num_elements * _FLOAT_BYTES + (1 << 10) * _num_threads()


@functools.cache
def _processor_features() -> frozenset[str]:
    """Return what the system says that the processor has; nothing where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    line = next((one for one in lines if one.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def _is_matrix_layout(value: torch.Tensor) -> bool:
    if value.dim() < 2:
        return value.is_contiguous()
    rows, columns = value.shape[-2:]
    row_stride, column_stride = value.stride()[-2:]
    return (column_stride == 1 and row_stride >= columns) or (
        row_stride == 1 and column_stride >= rows
    )


def _lstm_bytes(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Return one layer's weights, packed anew, and the gates of all steps; fitted [Empirical]."""
    sequence = inputs[0]
    matrices = [v for v in inputs[1:] if v.dim() == 2 and v.shape[0] % 4 == 0]
    layer_bytes = max((_nbytes((a, b)) for a, b in pairwise(matrices)), default=0)
    gate_rows = max((v.shape[0] for v in matrices), default=0)
    positions = math.prod(sequence.shape[:-1])
    gates_bytes = positions * gate_rows * sequence.element_size()
    biases_bytes = 4 * gate_rows * sequence.element_size()
    moved_bytes = 2 * _nbytes((sequence,)) + 2 * _nbytes(outputs)
    return layer_bytes + biases_bytes + 2 * gates_bytes + moved_bytes + (16 << 10)


def _batch_norm_bytes(image: torch.Tensor) -> int:
    """Return the statistics, and a copy where one point per channel leaves the layout ambiguous."""
    channels = image.shape[1]
    statistics_bytes = 4 * channels * max(image.element_size(), 4)
    is_ambiguous = image.numel() == image.shape[0] * channels
    return statistics_bytes + (_nbytes((image,)) if is_ambiguous else 0)
