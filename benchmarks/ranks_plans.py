"""Plans over many ranks and hosts beside what others measured; nothing is executed.

    python -m benchmarks.ranks_plans [--toy] [-o FILE]

Writes three tables to ``benchmarks/results/ranks_plans-<machine>-<date>.json``: rings over four unequal home machines
(prima.cpp), Llama 405B on 1,024 ranks, and training on one, two and four GPUs of one host (LoHan). ``--toy`` plans
two rows of the first and of the last, and four of 405B's layers on two hosts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.environment import headed, write_result
from benchmarks.ranks_home import TABLE, home_rows
from benchmarks.ranks_training import large_row, lohan_rows


def main(output: Path | None, *, toy: bool = False) -> dict[str, Any]:
    """Plan everything, print a line per row and write all rows; return them."""
    found: dict[str, Any] = headed("ranks_plans")
    found["home"] = home_rows(TABLE[:2] if toy else TABLE)
    print("constants", found["home"]["constants"])
    for row in found["home"]["rows"]:
        print(
            f"{row['model']}: measured {row['measured_ms']:.0f} ms, their placement {row['theirs_predicted_ms']:.0f} "
            f"({row['theirs_error']:+.1%}){' fitted' if row['fitted'] else ''}, ours {row['ours_ms']:.0f}, bound "
            f"{row['bound_ms']:.0f} (gap {row['gap']:.2%}), without swap {row['ours_without_swap_ms']:.0f}"
        )
        print(f"  theirs {row['theirs']}\n  ours {row['ours']}")
    found["large"] = large_row(num_hosts=2, layers=4) if toy else large_row()
    print(found["large"])
    found["lohan"] = lohan_rows(toy=toy)
    print({name: value for name, value in found["lohan"].items() if name != "rows"})
    for row in found["lohan"]["rows"]:
        print(
            f"{row['gpus']} GPUs x {row['rows_per_gpu']} rows: measured {row['measured_tflops']:.1f} TFLOPS, predicted "
            f"{row['predicted_tflops']:.1f} ({row['error']:+.1%}){' fitted' if row['fitted'] else ''}, ours "
            f"{row['ours_tflops']:.1f} (gap {row['ours_gap']:.2%})"
        )
    path = write_result(found, output)
    print(f"The rows are in {path}.")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    main(options.output, toy=options.toy)
