"""What plain sequential execution computes: a number per value, equal only where the history is."""

from __future__ import annotations

from dataclasses import dataclass, field

from gascompile.core.workload import OpSpec, TensorKind, Workload

PERSISTENT = (TensorKind.WEIGHT, TensorKind.STATE)


@dataclass(slots=True)
class Values:
    """The values of all tensors at one moment of sequential execution.

    A value is a number given to (op, which write, values read): a wrong or stale read shows at once
    and in all that depends on it.
    """

    workload: Workload
    current: dict[str, int] = field(default_factory=dict)
    first_run: dict[int, dict[str, int]] = field(default_factory=dict)
    """Per op of this iteration, the values that it read; where it writes in place, those too."""
    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict)
    _kinds: dict[str, TensorKind] = field(default_factory=dict)
    _iteration: int = -1

    def __post_init__(self) -> None:
        self._kinds = {t.name: t.kind for t in self.workload.tensors}
        for name, kind in self._kinds.items():
            if kind in PERSISTENT:
                self.current[name] = self._number("at first", name)

    def begin(self) -> None:
        """Start an iteration: inputs are new, and only persistent tensors and inputs have a value."""
        self._iteration += 1
        self.first_run = {}
        self.current = {n: v for n, v in self.current.items() if self._kinds[n] in PERSISTENT}
        for name, kind in self._kinds.items():
            if kind is TensorKind.INPUT:
                self.current[name] = self._number("input", name, self._iteration)

    def inputs_of(self, op: OpSpec) -> list[str]:
        """Return the tensors whose values an op depends on: reads, and writes that exist already."""
        return list(dict.fromkeys((*op.reads, *(n for n in op.writes if n in self.current))))

    def run(self, number: int) -> None:
        """Execute an op."""
        op = self.workload.ops[number]
        names = self.inputs_of(op)
        assert all(n in self.current for n in names), f"op {op.name} reads what has no value"
        self.first_run[number] = {n: self.current[n] for n in names}
        self.current |= self.results(number)

    def results(self, number: int) -> dict[str, int]:
        """Return what an op that has run wrote when it ran first."""
        read = tuple(self.first_run[number].values())
        writes = self.workload.ops[number].writes
        return {n: self._number("op", number, place, read) for place, n in enumerate(writes)}

    def _number(self, *history: object) -> int:
        return self._numbers.setdefault(history, len(self._numbers))
