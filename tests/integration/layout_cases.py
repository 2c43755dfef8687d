"""Sixty small modules, and the layouts that their inputs, weights and buffers are brought to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

Shape = tuple[int, ...]
Run = Callable[..., Any]
LAYOUTS = ("contiguous", "transposed", "channels_last", "expanded", "sliced")
PLACES = ("inputs", "weights", "buffers")


class Case(NamedTuple):
    """A function of a module and its inputs, and the shapes of all tensors."""

    run: Run
    inputs: tuple[Shape, ...] = ((4, 6),)
    weights: tuple[Shape, ...] = ((6, 6),)
    buffers: tuple[Shape, ...] = ((6, 6),)
    layer: Callable[[], nn.Module] = nn.Identity


class Calls(nn.Module):
    """The module of a case: weights ``w0``..., buffers ``b0``..., and a layer of torch's own."""

    def __init__(self, case: Case, layout: str = "contiguous", place: str = "") -> None:
        super().__init__()
        self.run = case.run
        self.layer = case.layer()
        for i, shape in enumerate(case.weights):
            self.register_parameter(f"w{i}", nn.Parameter(torch.randn(shape)))
        for i, shape in enumerate(case.buffers):
            self.register_buffer(f"b{i}", torch.randn(shape))
        for module in self.modules():
            for held in (module._parameters if place == "weights" else module._buffers,):
                for name, value in held.items():
                    if value is not None and place in {"weights", "buffers"}:
                        found = laid_out(value.detach(), layout)
                        held[name] = nn.Parameter(found) if place == "weights" else found  # type: ignore[assignment]  # either

    def forward(self, *values: torch.Tensor) -> Any:
        return self.run(self, *values)


def laid_out(value: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor of the same shape; of the same values, too, unless it is expanded."""
    if layout == "contiguous" or not value.dim():
        return value.clone(memory_format=torch.contiguous_format)
    if layout == "transposed":
        return value.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
    if layout == "channels_last":
        if value.dim() < 3:
            return laid_out(value, "transposed")
        return value.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)
    if layout == "expanded":
        return value[:1].clone().expand(value.shape)
    wide = torch.zeros((*value.shape[:-1], 2 * value.shape[-1] + 1), dtype=value.dtype)
    view = wide[..., 1::2]
    return view.copy_(value)


def _writes(target: torch.Tensor, value: float) -> torch.Tensor:
    target.add_(value)
    return target * 2


def _stride_reader(m: Any, x: torch.Tensor) -> Any:
    scale = 2.0 if x.is_contiguous() else 3.0
    return x * scale + (m.w0[0] if m.w0.is_contiguous() else m.w0[1]), m.b0 * m.b0.stride(0)


def _branch(m: Any, x: torch.Tensor) -> Any:
    flat = x.contiguous()
    flat.add_(1)
    held = m.b0.contiguous()
    held.mul_(2)
    return flat @ m.w0, held + m.b0


def _reshape_write(m: Any, x: torch.Tensor) -> Any:
    flat = x.reshape(-1)
    flat.add_(1)
    return flat, x * 2, m.w0.reshape(-1) * m.b0.reshape(-1)


def _windows(m: Any, x: torch.Tensor) -> Any:
    size = (2, 3)
    return (
        x.as_strided(size, x.stride()) * 2,
        m.w0.as_strided(size, m.w0.stride()),
        m.b0.as_strided(size, m.b0.stride()) + 1,
    )


def _attention(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    q, k, v = x @ m.w0, y @ m.w0, y @ m.b0
    return functional.scaled_dot_product_attention(q, k, v)


def _scatter(m: Any, x: torch.Tensor) -> Any:
    index = torch.arange(4).view(4, 1).expand(4, 6) % 6
    return torch.zeros(6, 6).scatter_(0, index, x) + m.w0.scatter_add(0, index, x), m.b0.gather(
        0, index
    )


def _put(m: Any, x: torch.Tensor) -> Any:
    made = m.w0.clone()
    made.index_put_((torch.tensor([0, 1]),), x[:2], accumulate=True)
    x.index_fill_(0, torch.tensor([1]), 7.0)
    return made, m.b0[[2, 0]] + x[1]


def _parts(m: Any, x: torch.Tensor) -> Any:
    a, b = x.chunk(2, -1)
    c, d = m.w0.split(3)
    return torch.stack([a, b]), torch.cat([c, d, m.b0]), a, d.t() @ c


def _complex(m: Any, x: torch.Tensor) -> Any:
    z = torch.complex(x, x @ m.w0)
    return torch.view_as_real(z.conj() * z), (z @ torch.complex(m.b0, m.w0)).abs()


def _module(m: Any, *values: torch.Tensor) -> Any:
    return m.layer(*values)


def _layer_and_more(m: Any, x: torch.Tensor) -> Any:
    made = m.layer(x)
    return made, made.flatten(1), x, made.mean() + m.w0.sum() + m.b0.sum()


def _conv(dims: int, **kwargs: Any) -> Case:
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return Case(
        _layer_and_more, ((2, 4, *[6] * dims),), layer=lambda: kinds[dims - 1](4, 6, 3, **kwargs)
    )


def _layer(make: Callable[[], nn.Module], *shapes: Shape) -> Case:
    return Case(_layer_and_more, shapes or ((4, 6),), layer=make)


def _states(m: Any, x: torch.Tensor) -> Any:
    m.b0.add_(x.mean(0))
    return m.b0 @ m.w0, m.b0.t()


def _rows(m: Any, x: torch.Tensor) -> Any:
    m.b0[1] += x[0]
    m.b0.t().mul_(1.5)
    return m.b0.sum(0) + m.w0[0]


def _twice(m: Any, x: torch.Tensor) -> Any:
    made = x + 1
    return made, made, made[0], made.t(), m.w0 - m.b0


def _tied(m: Any, x: torch.Tensor) -> Any:
    return functional.linear(functional.linear(x, m.w0), m.w0.t()) + functional.linear(x, m.b0)


CASES: dict[str, Case] = {
    "linear": Case(lambda m, x: functional.linear(x, m.w0) + functional.linear(x, m.b0)),
    "matmul": Case(lambda m, x: x @ m.w0 @ m.b0),
    "tied": Case(_tied),
    "linear_layer": _layer(lambda: nn.Linear(6, 5)),
    "bilinear": Case(
        lambda m, x: functional.bilinear(x, x, m.w0, m.b0[0, :3]), weights=((3, 6, 6),)
    ),
    "conv1d": _conv(1),
    "conv2d": _conv(2),
    "conv2d_groups": _conv(2, groups=2, padding=1),
    "conv3d": _conv(3),
    "conv_transposed": _layer(lambda: nn.ConvTranspose2d(4, 3, 3), (2, 4, 5, 5)),
    "conv_net": _layer(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)
        ).eval(),
        (2, 3, 8, 8),
    ),
    "conv_net_training": _layer(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        (2, 3, 8, 8),
    ),
    "layer_norm": _layer(lambda: nn.LayerNorm([4, 6]), (3, 4, 6)),
    "rms_norm": Case(lambda m, x: functional.rms_norm(x, (6,), m.w0[0]) + m.b0[:4]),
    "group_norm": _layer(lambda: nn.GroupNorm(2, 4), (2, 4, 5, 5)),
    "instance_norm": _layer(
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), (2, 4, 5, 5)
    ),
    "batch_norm": _layer(lambda: nn.BatchNorm1d(6)),
    "batch_norm_eval": _layer(lambda: nn.BatchNorm2d(4).eval(), (2, 4, 5, 5)),
    "attention": Case(_attention, ((2, 2, 4, 6), (2, 2, 5, 6))),
    "multihead": Case(
        lambda m, x: (m.layer(x, x, x)[0], m.w0 + m.b0),
        ((3, 4, 6),),
        layer=lambda: nn.MultiheadAttention(6, 2, batch_first=True).eval(),
    ),
    "encoder": _layer(
        lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, norm_first=True).eval(),
        (2, 4, 6),
    ),
    "embedding": Case(
        lambda m, x: (
            functional.embedding((x.abs() * 5).long() % 6, m.w0)
            + functional.embedding(torch.tensor([1]), m.b0)
        )
    ),
    "embedding_bag": Case(
        lambda m, x: functional.embedding_bag((x.abs() * 5).long() % 6, m.w0) + m.b0[:4]
    ),
    "lstm_cell": Case(lambda m, x: (m.layer(x), m.w0 @ m.b0), layer=lambda: nn.LSTMCell(6, 5)),
    "gru_cell": Case(lambda m, x: (m.layer(x), m.w0 @ m.b0), layer=lambda: nn.GRUCell(6, 5)),
    "rnn_cell": Case(lambda m, x: (m.layer(x), m.w0 @ m.b0), layer=lambda: nn.RNNCell(6, 5)),
    "max_pool": Case(
        lambda m, x: (
            functional.max_pool2d(x, 2),
            functional.max_pool1d(m.w0[None], 2),
            m.b0.amax(0),
        ),
        ((2, 4, 6, 6),),
    ),
    "avg_pool": Case(
        lambda m, x: (
            functional.avg_pool2d(x, 2),
            functional.adaptive_avg_pool2d(x, 2),
            m.w0.mean() + m.b0.mean(),
        ),
        ((2, 4, 6, 6),),
    ),
    "interpolate": Case(
        lambda m, x: (
            functional.interpolate(x, scale_factor=2),
            functional.interpolate(x, size=5, mode="bilinear"),
            m.w0 - m.b0,
        ),
        ((2, 4, 3, 3),),
    ),
    "view": Case(lambda m, x: (x.view(-1), m.w0.view(4, 9), m.b0.view(-1) * 2)),
    "reshape": Case(lambda m, x: (x.reshape(-1), m.w0.reshape(4, 9) + 1, m.b0.reshape(-1))),
    "reshape_write": Case(_reshape_write, ((6, 6),)),
    "flatten_write": Case(
        lambda m, x: (_writes(x.flatten(), 1.0), m.w0.flatten(), _writes(m.b0.flatten(), 2.0))
    ),
    "ravel": Case(lambda m, x: (x.ravel(), m.w0.ravel() * m.b0.ravel())),
    "contiguous_write": Case(_branch),
    "channels_last_write": Case(
        lambda m, x: (_writes(x.to(memory_format=torch.channels_last), 1.0), m.w0 * m.b0),
        ((2, 4, 3, 3),),
    ),
    "to_write": Case(
        lambda m, x: (
            _writes(x.to(torch.float32), 1.0),
            _writes(x.float(), 1.0),
            m.w0.type_as(x) + m.b0.to(x),
        )
    ),
    "clone_formats": Case(
        lambda m, x: (
            x.clone().flatten(),
            torch.empty_like(x).fill_(1).view_as(x),
            m.w0.clone() + m.b0.clone(),
        )
    ),
    "expand": Case(
        lambda m, x: (
            x[:, None].expand(4, 3, 6) * 1,
            x.expand(2, 4, 6),
            m.w0.expand(2, 6, 6).sum(0) + m.b0,
        )
    ),
    "permute": Case(
        lambda m, x: (
            x.permute(2, 0, 1),
            x.permute(1, 2, 0).contiguous(),
            m.w0.t(),
            m.b0.t() @ m.w0,
        ),
        ((2, 3, 4),),
    ),
    "unfold": Case(
        lambda m, x: (
            x.unfold(1, 3, 2),
            x.unfold(0, 2, 1) * 2,
            m.w0.unfold(0, 2, 2).sum(),
            m.b0.unfold(1, 3, 3).mean(),
        )
    ),
    "fold": Case(
        lambda m, x: (
            functional.unfold(x, 2),
            functional.fold(functional.unfold(x, 2), (4, 4), 2),
            m.w0 + m.b0,
        ),
        ((2, 3, 4, 4),),
    ),
    "as_strided": Case(_windows),
    "stride_reader": Case(_stride_reader),
    "write_input": Case(lambda m, x: (_writes(x, 1.0), m.w0 + m.b0)),
    "write_view": Case(lambda m, x: (_writes(x[1:, ::2], 1.0), x.t().mul_(2), m.w0 + m.b0)),
    "write_out": Case(
        lambda m, x, y: (torch.add(x, 1.0, out=y), y * 2, m.w0 + m.b0), ((4, 6), (4, 6))
    ),
    "write_dropout": Case(
        lambda m, x: (
            _writes(functional.dropout(x, training=False), 1.0),
            m.w0 + functional.dropout(m.b0, 0.0),
        )
    ),
    "write_copy": Case(lambda m, x, y: (x.copy_(y), y.zero_(), m.w0 + m.b0), ((4, 6), (4, 6))),
    "states": Case(_states),
    "states_by_views": Case(_rows),
    "return_input": Case(lambda m, x: (x, x[0], x.view_as(x), x.detach(), x.t(), m.w0 * m.b0)),
    "return_twice": Case(_twice),
    "return_weights": Case(lambda m, x: (m.w0, m.w0.t(), m.b0, m.b0[1:], x * 2)),
    "einsum": Case(
        lambda m, x: (
            torch.einsum("ij->ji", x),
            torch.einsum("ij,kj->ik", x, m.w0),
            torch.einsum("ii->i", m.b0),
        )
    ),
    "scatter": Case(_scatter),
    "index_put": Case(_put),
    "cat_and_chunk": Case(_parts),
    "complex": Case(_complex),
    "sort": Case(lambda m, x: (*x.sort(0), *m.w0.topk(2), m.b0.cumsum(1), m.b0.argmax())),
    "normalize": Case(
        lambda m, x: (functional.normalize(x), x.softmax(0), m.w0.log_softmax(1), m.b0.norm(dim=0))
    ),
    "batched": Case(
        lambda m, x: (
            torch.bmm(x, x.transpose(1, 2)),
            torch.baddbmm(m.w0, x, m.b0.expand(3, 6, 6)),
        ),
        ((3, 6, 6),),
    ),
    "pad": Case(
        lambda m, x: (
            functional.pad(x, (1, 2)),
            functional.pad(x[None], (1, 1), mode="reflect"),
            functional.pad(m.w0, (0, 0)) + m.b0.roll(1, 0),
        )
    ),
    "where": Case(
        lambda m, x: (torch.where(x > 0, x, m.b0[:4]), x.masked_fill(x < 0, 0), m.w0.tril())
    ),
}
