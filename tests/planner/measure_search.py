"""Measure whole searches of networks: `python tests/planner/measure_search.py`.

Prints one line a network, number of devices and limit of memory. A limit of `5%` leaves so much of
what lies between the least peak found in ten seconds and the fastest plan's; `0.8` is a part of the
latter. Times are wall-clock seconds; pricing comes before the search.
"""

from __future__ import annotations

import argparse
import time

import torch

import tilewise as tw
from tilewise import models
from tilewise.errors import PlanError
from tilewise.planner.search import Found
from tilewise.planner.within import least_peak

TIMES = {16: (2, 10), 256: (15, 60), 2048: (60, 120)}
NETWORKS = {
    "resnet50": (models.resnet50, (3, 224, 224), 1),
    "inception_v3": (models.inception_v3, (3, 299, 299), 1),
    "densenet121": (models.densenet121, (3, 224, 224), 1),
    "unet3d": (models.unet3d, (1, 128, 128, 128), 64),
}
SAMPLES = {16: 256, 256: 256, 2048: 2048}
"""Of pictures; of volumes a sixty-fourth."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--devices", type=int, nargs="+", choices=TIMES, default=list(TIMES))
    parser.add_argument("--limits", nargs="+", help="such as 5%% or 0.8")
    arguments = parser.parse_args()
    for devices in arguments.devices:
        free_seconds, seconds = TIMES[devices]
        for name in arguments.networks:
            make, shape, share = NETWORKS[name]
            samples = SAMPLES[devices] // share
            x = torch.empty(samples, *shape, device="meta")
            graph = tw.capture(make(), (x,))
            free = tw.search(
                graph, devices=devices, machine="lassen", memory=1 << 50, time_limit=free_seconds
            )
            show(name, devices, "none", free)
            limits = arguments.limits or (["5%", "50%", "0.95"] if devices == 16 else ["0.8"])
            for limit in limits:
                most = free.peak_bytes
                if limit.endswith("%"):
                    until = time.monotonic() + 10
                    start = [free.solution.choice]
                    least = least_peak(free.formulation, until, start).peak_bytes
                    memory = least + int((most - least) * float(limit[:-1]) / 100)
                else:
                    memory = int(float(limit) * most)
                try:
                    found = tw.search(
                        graph, devices=devices, machine="lassen", memory=memory, time_limit=seconds
                    )
                except PlanError as error:
                    print(f"{name:12} {devices:5} {limit:>5}  {str(error).splitlines()[0]}")
                    continue
                show(name, devices, limit, found)


def show(name: str, devices: int, limit: str, found: Found) -> None:
    proven = "best" if found.optimal else f"gap {found.gap:.2%}"
    print(
        f"{name:12} {devices:5} {limit:>5}  {found.step_seconds * 1e3:10.3f} ms  {proven:10} "
        f"{found.solve_seconds:6.1f} s, pricing {found.price_seconds:5.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
