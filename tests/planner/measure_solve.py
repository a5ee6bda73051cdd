"""Measure the solver on problems shaped like networks: `python tests/planner/measure_solve.py`.

Prints one line a network, number of devices and cap. Times are CPU seconds, which on a machine
that does nothing else are wall-clock seconds; limits are in the same unit.
"""

from __future__ import annotations

import argparse
import time

from networks import NETWORKS

from tilewise.planner.solve import least_memory, solve

LIMITS = {16: (2, 10), 256: (15, 60), 2048: (60, 120)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--devices", type=int, nargs="+", default=[16, 256])
    parser.add_argument("--batch", type=float, default=1.0, help="samples a device")
    parser.add_argument("--capped", action="store_true", help="also with half the spare memory")
    arguments = parser.parse_args()
    time.monotonic = time.process_time
    for devices in arguments.devices:
        for name in arguments.networks:
            problem = NETWORKS[name](devices, max(1, int(devices * arguments.batch)))
            free, limited = LIMITS.get(devices, (60, 120))
            found = solve(problem, time_limit=free)
            head = f"{name:12} {devices:5} devices {max(problem.choices):6} candidates"
            print(f"{head}  free    {_line(found)}", flush=True)
            if arguments.capped:
                least = least_memory(problem, limited)
                assert least is not None
                cap = (least.peak_bytes + found.peak_bytes) // 2
                print(
                    f"{head}  capped  {_line(solve(problem, cap, time_limit=limited))}", flush=True
                )


def _line(found) -> str:  # type: ignore[no-untyped-def]
    return (
        f"{found.seconds * 1e3:10.4f} ms  gap {found.gap:8.2%}  optimal {found.optimal!s:5}  "
        f"{found.solve_seconds:6.2f} s  {dict(found.statistics)}"
    )


if __name__ == "__main__":
    main()
