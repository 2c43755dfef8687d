"""Ops whose results torch describes with other strides than they have: steps that compute with views of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import gascompile
from gascompile.training.capture import exact_strides
from tests.training.runs import MACHINE, PLANNING_S

NUM_STEPS = 3
_aten = torch.ops.aten
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu6": functional.relu6,
    "softplus": functional.softplus,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "logit": lambda x: x.sigmoid().logit(1e-3),
    "dropout": lambda x: functional.dropout(x, 0.3),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "log_softmax": lambda x: x.log_softmax(-1),
    "elu": functional.elu,
    "gelu": functional.gelu,
}
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {
    "mse": functional.mse_loss,
    "smooth_l1": functional.smooth_l1_loss,
    "huber": functional.huber_loss,
    "bce": lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "bce of rows": lambda x, y: (
        functional.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction="none")
        .transpose(1, 2)
        .flatten(1)
        .square()
        .mean()
    ),
    "xlogy": lambda x, y: (
        torch.xlogy(x.sigmoid(), y.sigmoid()).transpose(1, 2).flatten(1).square().mean()
    ),
}


class Turned(nn.Module):
    """Layers before and behind a transposition."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor], last: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(8, 16), last, act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned: torch.Tensor = self.last(self.act(self.first(x)).transpose(1, 2))
        return turned


def _trains_as_eager(model: nn.Module, loss: Any, batches: list[Any], cache: Path) -> None:
    other = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    torch.manual_seed(5)
    wanted = []
    for batch in batches:
        optimizer.zero_grad()
        result = loss(other, batch)
        result.backward()
        optimizer.step()
        wanted.append(result.item())
    torch.manual_seed(5)
    ours = torch.optim.AdamW(model.parameters(), lr=0.01)
    how: dict[str, Any] = {"machine": MACHINE, "cache_dir": cache, "time_limit_s": PLANNING_S}
    with gascompile.compile_step(model, loss, ours, "64MiB", batches[0], **how) as step:
        assert [step(batch).item() for batch in batches] == pytest.approx(wanted, rel=1e-6)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("last", ["linear", "convolution"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gradient_that_lies_turned(name: str, last: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(12, 6) if last == "linear" else nn.Conv1d(16, 6, 3)
    model = Turned(ACTIVATIONS[name], layer)
    batches = [torch.randn(2, 12, 8) for _ in range(NUM_STEPS)]
    _trains_as_eager(model, lambda m, x: m(x).square().mean(), batches, tmp_path)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_values_that_lie_turned(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Linear(8, 16)
    batches = [(torch.randn(2, 12, 8), torch.randn(2, 16, 12)) for _ in range(NUM_STEPS)]
    loss = LOSSES[name]
    _trains_as_eager(model, lambda m, b: loss(m(b[0]).transpose(1, 2), b[1]), batches, tmp_path)


def test_a_family_of_models(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3NextConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        mlp_only_layers=[0, 1],
        use_cache=False,
    )
    torch.manual_seed(2)
    model = transformers.Qwen3NextForCausalLM(config)
    ids = [torch.randint(0, 64, (2, 10)) for _ in range(2)]
    _trains_as_eager(model, lambda m, x: m(input_ids=x, labels=x).loss, ids, tmp_path)


def _laid(turned: bool) -> torch.Tensor:
    value = torch.rand(2, 12, 4) * 0.8 + 0.1
    return value.transpose(1, 2).contiguous().transpose(1, 2) if turned else value


def _binary(op: Any, *more: Any) -> Callable[..., Any]:
    return lambda a, b: op(a, b, *more)


OPS: dict[str, Callable[..., Any]] = {
    "softplus_backward": _binary(_aten.softplus_backward.default, 1, 20),
    "hardtanh_backward": _binary(_aten.hardtanh_backward.default, -1, 1),
    "hardswish_backward": _binary(_aten.hardswish_backward.default),
    "hardsigmoid_backward": _binary(_aten.hardsigmoid_backward.default),
    "logit_backward": _binary(_aten.logit_backward.default),
    "leaky_relu_backward": _binary(_aten.leaky_relu_backward.default, 0.1, False),
    "elu_backward": lambda a, b: _aten.elu_backward.default(a, 1, 1, 1, False, b),
    "gelu_backward": _binary(_aten.gelu_backward.default),
    "silu_backward": _binary(_aten.silu_backward.default),
    "mish_backward": _binary(_aten.mish_backward.default),
    "tanh_backward": _binary(_aten.tanh_backward.default),
    "sigmoid_backward": _binary(_aten.sigmoid_backward.default),
    "threshold_backward": _binary(_aten.threshold_backward.default, 0),
    "softshrink_backward": _binary(_aten.softshrink_backward.default, 0.5),
    "hardshrink_backward": _binary(_aten.hardshrink_backward.default, 0.5),
    "log_sigmoid_backward": lambda a, b: _aten.log_sigmoid_backward.default(a, b, b + 1),
    "mse_loss_backward": lambda a, b: _aten.mse_loss_backward.default(a, b, a, 0),
    "smooth_l1_loss_backward": lambda a, b: _aten.smooth_l1_loss_backward.default(a, b, a, 0, 1.0),
    "huber_loss_backward": lambda a, b: _aten.huber_loss_backward.default(a, b, a, 0, 1.0),
    "binary_cross_entropy_backward": lambda a, b: _aten.binary_cross_entropy_backward.default(
        a, b, a
    ),
    "_softmax_backward_data": _binary(_aten._softmax_backward_data.default, -1, torch.float32),
    "_log_softmax_backward_data": _binary(
        _aten._log_softmax_backward_data.default, -1, torch.float32
    ),
    "native_dropout_backward": lambda a, b: _aten.native_dropout_backward.default(a, b > 0.5, 2.0),
    "glu_backward": lambda a, b: _aten.glu_backward.default(a[..., :2], b, -1),
    "prelu": lambda a, b: _aten._prelu_kernel_backward.default(a, b, a)[0],
    "xlogy": _binary(_aten.xlogy.Tensor),
    "atan2": _binary(_aten.atan2.default),
    "maximum": _binary(_aten.maximum.default),
    "pow": _binary(_aten.pow.Tensor_Tensor),
    "hypot": _binary(_aten.hypot.default),
    "fmod": _binary(_aten.fmod.Tensor),
    "where": lambda a, b: _aten.where.self(a > 0.5, a, b),
    "lerp": lambda a, b: _aten.lerp.Tensor(a, b, a),
    "addcmul": lambda a, b: _aten.addcmul.default(a, b, a),
    "addcdiv": lambda a, b: _aten.addcdiv.default(a, b, a),
    "masked_fill": lambda a, b: _aten.masked_fill.Scalar(a, b > 0.5, 0.0),
    "clamp": lambda a, b: _aten.clamp.Tensor(a, b, b + 1),
    "mse_loss": _binary(_aten.mse_loss.default, 0),
    "smooth_l1_loss": _binary(_aten.smooth_l1_loss.default, 0),
    "huber_loss": _binary(_aten.huber_loss.default, 0),
    "binary_cross_entropy": _binary(_aten.binary_cross_entropy.default, None, 0),
    "binary_cross_entropy_with_logits": _binary(
        _aten.binary_cross_entropy_with_logits.default, None, None, 0
    ),
    "rrelu_with_noise": _binary(_aten.rrelu_with_noise.default, 0.1, 0.3, True),
    "_log_softmax": lambda a, b: _aten._log_softmax.default(a, -1, False),
    "hardtanh": lambda a, b: _aten.hardtanh.default(a),
    "softplus": lambda a, b: _aten.softplus.default(a),
    "native_dropout": lambda a, b: _aten.native_dropout.default(a, 0.5, True)[1],
}


@pytest.mark.parametrize("name", OPS)
def test_ops_that_are_described_wrongly_are_known(name: str) -> None:
    call = OPS[name]
    for turned in ((False, True), (True, False), (True, True)):
        values = [_laid(each) for each in turned]
        real = call(*values)
        with FakeTensorMode() as mode:
            described = call(*(mode.from_tensor(value) for value in values))
        if real.stride() != described.stride():
            known = exact_strides._ROWS
            if turned != (True, True):
                known |= exact_strides._MIXED
            assert name in known, (turned, real.stride(), described.stride())
