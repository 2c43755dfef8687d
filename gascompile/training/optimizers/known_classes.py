"""The optimizers that update by their own class: what each reads and keeps."""

from __future__ import annotations

from typing import Final

import torch

from gascompile.training.optimizers.class_rules import ClassRule, Group

_ADAM = ("exp_avg", "exp_avg_sq")


def _adam(group: Group) -> tuple[str, ...]:
    return (*_ADAM, "max_exp_avg_sq") if group["amsgrad"] else _ADAM


def _rmsprop(group: Group) -> tuple[str, ...]:
    momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
    return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))


def _transformers_adafactor(group: Group) -> tuple[str, ...]:
    mean = () if group["beta1"] is None else ("exp_avg",)
    return (*mean, "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")


_AMSGRAD = tuple(
    ClassRule(
        name=f"{kind.lower()}_by_class",
        module=f"torch.optim.{kind.lower()}",
        kind=kind,
        options=(
            "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay",
        ),
        tuples=("betas",),
        keys=_adam,
        lies={},
        fused=True,
    )
    for kind in ("Adam", "AdamW")
)  # fmt: skip
RULES: Final[tuple[ClassRule, ...]] = (
    *_AMSGRAD,
    ClassRule(
        name="rmsprop",
        module="torch.optim.rmsprop",
        kind="RMSprop",
        options=("lr", "momentum", "alpha", "eps", "centered", "weight_decay", "maximize"),
        keys=_rmsprop,
        lies={},
    ),
    ClassRule(
        name="nadam",
        module="torch.optim.nadam",
        kind="NAdam",
        options=(
            "lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay",
            "maximize",
        ),
        tuples=("betas",),
        keys=lambda _: (*_ADAM, "mu_product"),
        lies={"mu_product": "scalar"},
    ),
    ClassRule(
        name="radam",
        module="torch.optim.radam",
        kind="RAdam",
        options=("lr", "betas", "eps", "weight_decay", "maximize", "decoupled_weight_decay"),
        tuples=("betas",),
        keys=lambda _: _ADAM,
        lies={},
    ),
    ClassRule(
        name="adagrad",
        module="torch.optim.adagrad",
        kind="Adagrad",
        options=(
            "lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "maximize",
        ),
        keys=lambda _: ("sum",),
        lies={},
        first=lambda group: {"sum": group["initial_accumulator_value"]},
    ),
    ClassRule(
        name="adamax",
        module="torch.optim.adamax",
        kind="Adamax",
        options=("lr", "betas", "eps", "weight_decay", "maximize"),
        tuples=("betas",),
        keys=lambda _: ("exp_avg", "exp_inf"),
        lies={},
    ),
    ClassRule(
        name="adadelta",
        module="torch.optim.adadelta",
        kind="Adadelta",
        options=("lr", "rho", "eps", "weight_decay", "maximize"),
        keys=lambda _: ("square_avg", "acc_delta"),
        lies={},
    ),
    ClassRule(
        name="lion",
        module="lion_pytorch.lion_pytorch",
        kind="Lion",
        options=("lr", "betas", "weight_decay"),
        tuples=("betas",),
        keys=lambda _: ("exp_avg",),
        lies={},
        counts=False,
    ),
    ClassRule(
        name="muon",
        module=torch.optim.Muon.__module__,
        kind="Muon",
        options=(
            "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps",
            "adjust_lr_fn",
        ),
        tuples=("ns_coefficients",),
        keys=lambda _: ("momentum_buffer",),
        lies={},
        counts=False,
        whole=True,
        scratch=3,
        square_scratch=1.5,
    ),
    ClassRule(
        name="adafactor",
        module=torch.optim.Adafactor.__module__,
        kind="Adafactor",
        options=("lr", "beta2_decay", "eps", "d", "weight_decay", "maximize"),
        tuples=("eps",),
        keys=lambda _: ("row_var", "col_var", "variance"),
        lies={"row_var": "kept rows", "col_var": "kept columns"},
        vector_keys=("variance",),
        whole=True,
        scratch=2,
    ),
    ClassRule(
        name="transformers_adafactor",
        module="transformers.optimization",
        kind="Adafactor",
        options=(
            "lr", "eps", "clip_threshold", "decay_rate", "beta1", "weight_decay",
            "scale_parameter", "relative_step", "warmup_init",
        ),
        tuples=("eps",),
        keys=_transformers_adafactor,
        lies={"exp_avg_sq_row": "rows", "exp_avg_sq_col": "columns"},
        vector_keys=("exp_avg_sq",),
        whole=True,
        scratch=3,
    ),
)  # fmt: skip


def rule_of(optimizer: torch.optim.Optimizer) -> ClassRule | None:
    """Return the rule of an optimizer; ``None`` for one that has none, and for Adam without ``amsgrad``."""
    for rule in RULES:
        if rule.is_of(optimizer):
            plain = rule in _AMSGRAD
            if plain and not any(group["amsgrad"] for group in optimizer.param_groups):
                return None
            return rule
    return None
