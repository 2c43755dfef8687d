"""Why a training step over ranks is sharded as it is: what it takes with each other choice for all of its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gascompile.core.errors import InfeasiblePlanError, SolverError, UnsupportedOpError
from gascompile.core.hosts import Hosts
from gascompile.core.hosts_plan import HostsPlan, ShardGroup
from gascompile.core.serial import json_name
from gascompile.core.sizes import format_size
from gascompile.core.workload import Workload
from gascompile.passes.parallel.plan_shards import plan_shards, planned_with
from gascompile.passes.parallel.shard_options import Option, Training

_SHARDED, _WHOLE = "sharded over ranks", "whole on each rank"
_TERMS: dict[str, tuple[tuple[str, Callable[[Option | ShardGroup], bool]], ...]] = {
    "parameters": (
        (_WHOLE, lambda o: o.params_over == 1),
        (
            f"{_SHARDED}, kept gathered for the backward pass",
            lambda o: o.params_over > 1 and o.keeps,
        ),
        (f"{_SHARDED}, gathered for it again", lambda o: o.params_over > 1 and not o.keeps),
        ("in the GPU", lambda o: o.params_home == "gpu"),
        ("in RAM", lambda o: o.params_home == "cpu"),
        ("on drives", lambda o: o.params_home == "nvme"),
    ),
    "states": (
        (_WHOLE, lambda o: o.states_over == 1),
        (_SHARDED, lambda o: o.states_over > 1),
        ("in the GPU", lambda o: o.states_home == "gpu"),
        ("in RAM", lambda o: o.states_home == "cpu"),
        ("on drives", lambda o: o.states_home == "nvme"),
    ),
    "activations": (
        ("in the GPU", lambda o: o.activations == "gpu"),
        ("in RAM", lambda o: o.activations == "cpu"),
        ("on drives", lambda o: o.activations == "nvme"),
        ("computed again", lambda o: o.activations.startswith("recompute")),
    ),
}
SUBJECTS = tuple(_TERMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherShards:
    """The best plan in which all layers have one choice in common."""

    choice: str
    layers: int
    """Of the plan, how many have it."""
    predicted_s: float | None = field(metadata=json_name("predicted_seconds"))
    """``None`` where there is no such plan."""
    change_s: float | None = field(metadata=json_name("change_seconds"))
    binding: str = ""
    obstacle: str = ""
    """Why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsExplanation:
    """What a plan does with parameters, states or activations, and what else it could."""

    subject: str
    plan: HostsPlan
    others: tuple[OtherShards, ...]

    @property
    def reason(self) -> str:
        """Why they are where they are, in a sentence."""
        chosen = [other for other in self.others if other.layers == self.plan.num_layers]
        worse = [other for other in self.others if other.layers < self.plan.num_layers]
        none = sum(other.predicted_s is None for other in worse)
        slower = sum((other.change_s or 0.0) > 0.0 for other in worse)
        what = ", ".join(other.choice for other in chosen) or "layers are not all treated alike"
        return (
            f"{what}: of {len(worse)} other choices {none} have no room or are not there, {slower} are slower; "
            f"{self.plan.binding} binds"
        )


def explain_shards(
    subject: str, workload: Workload, hosts: Hosts, training: Training
) -> ShardsExplanation:
    """Return why parameters, states or activations of a training step are where they are.

    Raises:
        InfeasiblePlanError: the places are too small for any step.
        UnsupportedOpError: the workload is no chain of layers, or the hosts are not equal.
        ValueError: ``subject`` is none of ``SUBJECTS``.
    """
    if subject not in _TERMS:
        raise ValueError(f"'{subject}' is not sharded over ranks; ask for {', '.join(SUBJECTS)}")
    made = plan_shards(workload, hosts, training=training)
    others = []
    for choice, allows in _TERMS[subject]:
        num_layers = sum(g.layers for g in made.groups if allows(g))
        predicted_s, binding, obstacle = None, "", ""
        try:
            # Where all layers have it, it is the plan itself.
            is_it = num_layers == made.num_layers
            other = made if is_it else planned_with(workload, hosts, training, allows)
            predicted_s, binding = other.predicted_s, other.binding
        except (InfeasiblePlanError, SolverError, UnsupportedOpError) as error:
            obstacle = _why_not(error)
        others.append(
            OtherShards(
                choice=choice,
                layers=num_layers,
                predicted_s=predicted_s,
                change_s=None if predicted_s is None else predicted_s - made.predicted_s,
                binding=binding,
                obstacle=obstacle,
            )
        )
    return ShardsExplanation(subject=subject, plan=made, others=tuple(others))


def _why_not(error: Exception) -> str:
    if isinstance(error, InfeasiblePlanError):
        sizes = map(format_size, (error.required_bytes, error.limit_bytes))
        return "needs {} of {tier}, which has {}".format(*sizes, tier=error.tier)
    return str(error).split("\n")[0]
