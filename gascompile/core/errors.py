"""Typed errors. Each message says what happened, with which numbers, and what to try.

Wrong arguments raise ``ValueError`` or ``TypeError``; everything below is a failed job.
"""

from __future__ import annotations

from dataclasses import dataclass

from gascompile.core.sizes import format_enough, format_size


def first_line_of(error: BaseException, most: int = 500) -> str:
    """Return the first line of what an error says, at most so many characters; its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:most]


class GASCompileError(Exception):
    """Root of every error that GASCompile raises for a job that failed."""


class CaptureError(GASCompileError):
    """The model cannot be captured as a graph; names the line of the model and the way out."""


class UnsupportedOpError(GASCompileError):
    """An op of the graph cannot be annotated, saved or executed."""


class CompiledModelError(GASCompileError):
    """A compiled model is asked for what its plans rule out: another device or dtype, new weights, a copy of itself."""


class CheckpointError(GASCompileError):
    """A weight file is missing, truncated or corrupt, or does not fit the model."""


class UnknownPlaceError(GASCompileError):
    """A budget names a place that the machine does not have.

    Attributes:
        place: its name.
        known: the names of the machine's places.
    """

    def __init__(self, place: str, machine: str, known: tuple[str, ...]) -> None:
        self.place = place
        self.known = known
        self._machine = machine
        super().__init__(
            f"the budget names '{place}', which machine '{machine}' does not have; its places are {', '.join(known)}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the arguments, so that the error crosses process boundaries."""
        return UnknownPlaceError, (self.place, self._machine, self.known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Something that a tier has to hold, whatever the plan."""

    kind: str
    """``weight``, ``activation``, ``state`` and so on, ``workspace``, or ``reserved``."""
    name: str
    size_bytes: int
    op: str = ""
    """The op at which it is needed; empty for what is there all the time."""


class InfeasiblePlanError(GASCompileError):
    """No plan keeps the budget.

    Attributes:
        required_bytes: the smallest feasible budget of ``tier``.
        limit_bytes: the budget that was given.
        tier: the tier that is too small.
        op: the op that sets ``required_bytes``.
        demands: what ``required_bytes`` is made of, the largest first; empty where that is not known.
    """

    def __init__(
        self,
        *,
        required_bytes: int,
        limit_bytes: int,
        tier: str,
        op: str,
        demands: tuple[Demand, ...] = (),
    ) -> None:
        self.required_bytes = required_bytes
        self.limit_bytes = limit_bytes
        self.tier = tier
        self.op = op
        self.demands = demands
        super().__init__(
            f"the budget of {format_size(limit_bytes)} ({limit_bytes} bytes) for tier '{tier}' is too small: op '{op}' "
            f"needs {format_size(required_bytes)}{_in_words(demands)}. The smallest feasible budget is "
            f"{required_bytes} bytes: give '{tier}' {format_enough(required_bytes)} or more, or pass smaller example "
            "inputs."
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the keyword arguments, so that the error crosses process boundaries."""
        names = ("required_bytes", "limit_bytes", "tier", "op", "demands")
        return _rebuild_infeasible, tuple(getattr(self, name) for name in names)


def _rebuild_infeasible(
    required_bytes: int, limit_bytes: int, tier: str, op: str, demands: tuple[Demand, ...]
) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        required_bytes=required_bytes, limit_bytes=limit_bytes, tier=tier, op=op, demands=demands
    )


def _in_words(demands: tuple[Demand, ...]) -> str:
    """Return the demands by kind with the largest of each: ``weights 4.00 MiB ('a', 'b' and 2 more) at 'op'``."""
    kinds: dict[tuple[str, str], list[Demand]] = {}
    for demand in demands:
        if not demand.size_bytes:
            continue
        kinds.setdefault((demand.kind, demand.op), []).append(demand)
    parts = []
    for (kind, op), group in kinds.items():
        names = ", ".join(f"'{demand.name}'" for demand in group[:2])
        more = f" and {len(group) - 2} more" if len(group) > 2 else ""
        where = f" at '{op}'" if op else ""
        size = format_size(sum(demand.size_bytes for demand in group))
        parts.append(f"{kind} {size} ({names}{more}){where}")
    return f": {', '.join(parts)}" if parts else ""


class BudgetExceededError(GASCompileError):
    """A run was about to take more memory than its budget, and was stopped before it did.

    Attributes:
        op: the op that asked for it.
        planned_bytes: what the plan has for the op's results and the buffers of its kernel.
        real_bytes: what the op had taken and asked for; it may need more.
        budget_bytes: the budget of ``tier``.
        tier: the tier that computes.
        half_updated: whether states or inputs that the model writes to may hold values of the stopped run.
    """

    def __init__(
        self,
        *,
        op: str,
        planned_bytes: int,
        real_bytes: int,
        budget_bytes: int,
        tier: str,
        half_updated: bool = False,
    ) -> None:
        self.op = op
        self.planned_bytes = planned_bytes
        self.real_bytes = real_bytes
        self.budget_bytes = budget_bytes
        self.tier = tier
        self.half_updated = half_updated
        written = (
            " States or inputs that the model writes to may be half updated: set them anew."
            if half_updated
            else ""
        )
        super().__init__(
            f"op '{op}' asks for {format_size(real_bytes)} ({real_bytes} bytes), for which "
            f"{format_size(planned_bytes)} ({planned_bytes} bytes) are planned: with it the run would pass the budget "
            f"of {format_size(budget_bytes)} ({budget_bytes} bytes) for tier '{tier}', and was stopped.{written} The "
            f"next plan knows it: compile again, give '{tier}' more, or let it pass with on_exceed=\"warn\"."
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the keyword arguments, so that the error crosses process boundaries."""
        names = ("op", "planned_bytes", "real_bytes", "budget_bytes", "tier", "half_updated")
        return _rebuild_exceeded, tuple(getattr(self, name) for name in names)


def _rebuild_exceeded(
    op: str, planned_bytes: int, real_bytes: int, budget_bytes: int, tier: str, half_updated: bool
) -> BudgetExceededError:
    return BudgetExceededError(
        op=op,
        planned_bytes=planned_bytes,
        real_bytes=real_bytes,
        budget_bytes=budget_bytes,
        tier=tier,
        half_updated=half_updated,
    )


class DeviceMapError(GASCompileError):
    """A device map does not fit the model or the machine.

    Attributes:
        names: the prefixes or weights that do not fit.
    """

    def __init__(self, message: str, *, names: tuple[str, ...] = ()) -> None:
        self.names = names
        super().__init__(message)


class SolverError(GASCompileError):
    """The solver ended in a state that is not understood."""


class PlanVerificationError(GASCompileError):
    """A plan breaks a budget or a dependency and is refused.

    Attributes:
        step: index of the first offending step in ``plan.steps``, or -1 for the plan as a whole.
    """

    def __init__(self, message: str, *, step: int = -1) -> None:
        self.step = step
        super().__init__(message)


class PlanMismatchError(GASCompileError):
    """A plan, bundle or input belongs to another graph, machine, version or shape."""


class FormatError(GASCompileError):
    """A file is not of the format or version that this reader knows."""


class StorageError(GASCompileError):
    """Reading or writing a tier failed: a read error, a short read, a full disk, a replaced file."""


class ForkedError(StorageError):
    """Something was used in a child process that belongs, with its threads and files, to the parent."""


class RankError(GASCompileError):
    """Another rank of the job has failed, is silent, or does something else; raised on every rank that is left.

    Attributes:
        rank: the one it is about; -1 where that is not known.
    """

    def __init__(self, message: str, *, rank: int = -1) -> None:
        """Keep ``message`` and the rank."""
        super().__init__(message)
        self.rank = rank


class RankMismatchError(RankError):
    """Ranks differ in what they are about to do; raised on all of them before anything has changed."""


class DeviceError(GASCompileError):
    """The device that a machine computes on cannot be used, or has failed.

    Attributes:
        cause: which of the things that can be wrong with a device it is, in two or three words: ``no driver``,
            ``no device``, ``torch build``, ``driver refused``, ``device memory``, ``pinned memory`` and so on.
    """

    def __init__(self, message: str, *, cause: str = "") -> None:
        self.cause = cause
        super().__init__(message)


class RaceError(DeviceError):
    """Two streams touch the same bytes, and nothing orders them: a wait or an event is missing.

    Attributes:
        tensor: what the bytes were used for by the access that came second.
        address: first byte that both touch, from the start of its memory.
    """

    def __init__(self, message: str, *, tensor: str, address: int) -> None:
        self.tensor = tensor
        self.address = address
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the keyword arguments, so that the error crosses process boundaries."""
        return _rebuild_race, (str(self), self.tensor, self.address)


def _rebuild_race(message: str, tensor: str, address: int) -> RaceError:
    return RaceError(message, tensor=tensor, address=address)


class ClosedStepError(GASCompileError):
    """A training step was used after ``close``."""


class OpenStepError(GASCompileError):
    """A model or an optimizer was used in a way that is not possible while a step or a plan has its values."""


class NanLossError(GASCompileError):
    """A training step met a NaN.

    Attributes:
        step: number of the step, from one on.
        op: the first op whose result has one, where that was looked for.
    """

    def __init__(self, *, step: int, op: str = "") -> None:
        self.step = step
        self.op = op
        where = (
            f"op '{op}' of step {step} made the first NaN"
            if op
            else f"the loss of step {step} is NaN, and nothing has been updated with it"
        )
        more = "" if op else "pass on_nan='locate' to learn which op makes it, "
        super().__init__(
            f"{where}; {more}look at this batch, the learning rate and max_grad_norm, or go on with on_nan='ignore'"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the keyword arguments, so that the error crosses process boundaries."""
        return _rebuild_nan_loss, (self.step, self.op)


def _rebuild_nan_loss(step: int, op: str) -> NanLossError:
    return NanLossError(step=step, op=op)


class UnsafeCacheWarning(UserWarning):
    """A cache folder is not used, as others than this user could have written into it."""
