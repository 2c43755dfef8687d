"""Plan generated training iterations beyond GPU memory; compare with the heuristics in the same model.

    python -m benchmarks.training_plans [--seconds 30] [net ...]

Prints per net the share of the ideal (the sum of all ops' seconds by the seconds of an iteration), beside what
G10's artifact publishes for hardware paging and for moves by software. Everything is simulated.
"""

from __future__ import annotations

import argparse
import time

from benchmarks.training_traces import NETS, PUBLISHED, published_trace, reference_machine
from gascompile.passes.interval_problem import interval_problem
from gascompile.passes.interval_search import Search
from gascompile.passes.interval_strategies import STRATEGIES
from gascompile.passes.plan_intervals import plan_intervals


def strategy_shares(name: str) -> dict[str, float]:
    """Return the share of the ideal that each heuristic reaches by itself; 0 where it does not fit."""
    task = interval_problem(published_trace(name), reference_machine(), {})
    shares: dict[str, float] = {}
    for strategy, choose in STRATEGIES.items():
        search = Search(task, time_limit_s=60.0, mip_gap=0.0)
        found = search.consider(strategy, choose(search.base))
        shares[strategy] = task.compute_s / found.seconds if found else 0.0
    return shares


def main(names: list[str], time_limit_s: float) -> None:
    """Plan each net of ``names`` and print one line for it and one for the heuristics."""
    for name in names:
        workload = published_trace(name)
        ideal_s = sum(op.time_s["gpu"] for op in workload.ops)
        begun_s = time.perf_counter()
        plan = plan_intervals(workload, reference_machine(), {}, time_limit_s=time_limit_s)
        wall_s = time.perf_counter() - begun_s
        known = PUBLISHED[name]
        print(
            f"{name}: {len(workload.ops)} ops, {len(workload.tensors)} tensors, {plan.seconds:.3f} s, "
            f"share {ideal_s / plan.seconds:.4f}, gap {1 - plan.bound_s / plan.seconds:.4f}, "
            f"{plan.strategy}, planned in {wall_s:.1f} s; G10 {known.share} and {known.software_share}"
        )
        shares = strategy_shares(name)
        print("  " + ", ".join(f"{key} {share:.3f}" for key, share in shares.items()), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NETS), metavar="net")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    main(options.names, options.seconds)
