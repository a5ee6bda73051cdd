"""Seconds of messages and sums on a machine; arrays in, arrays out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tilewise.planner.bills import Bill
from tilewise.planner.machine import Link, Machine
from tilewise.planner.traffic import Traffic

Floats = NDArray[np.float64]


def link_s(link: Link, size_bytes: Floats, messages: Floats) -> Floats:
    """Return the seconds in which a device receives so many bytes in so many messages."""
    rounds = np.ceil(messages / link.concurrent_messages)
    return rounds * link.latency_s + size_bytes / link.bandwidth_bytes_per_s


def sum_s(machine: Machine, size_bytes: Floats, ranks: Floats, span: Floats) -> Floats:
    """Return the seconds of a sum over `ranks` ranks; `span` is how many devices they reach over.

    The formulas are those of AllReduce in machine.py.
    """
    model = machine.all_reduce
    far = span > machine.devices_per_node
    latency = np.where(far, machine.network.latency_s, machine.node.latency_s)
    rate = np.where(far, machine.network.bandwidth_bytes_per_s, machine.node.bandwidth_bytes_per_s)
    latency = latency * model.latency_share
    rate = rate * model.efficiency
    rounds = np.log2(np.maximum(ranks, 1.0))
    small = rounds * (latency + size_bytes / rate)
    ring = (ranks - 1.0) / np.maximum(ranks, 1.0)
    large = 2.0 * rounds * latency + 2.0 * ring * size_bytes / rate
    seconds = np.where(size_bytes <= model.small_bytes, np.minimum(small, large), large)
    return np.where((ranks > 1) & (size_bytes > 0), seconds + model.overhead_s, 0.0)


def bill_s(machine: Machine, bill: Bill, itemsize: int) -> Floats:
    """Return the seconds of moves between layouts."""
    near = link_s(machine.node, bill.near * itemsize, bill.near_messages)
    far = link_s(machine.network, bill.far * itemsize, bill.far_messages)
    seconds = near + far
    summed = bill.summed > 0
    if summed.any():
        size, ranks, span = (
            np.broadcast_to(one, seconds.shape)[summed]
            for one in (bill.summed * itemsize, bill.sharers, bill.span)
        )
        seconds[summed] += sum_s(machine, size, ranks, span)
    return seconds


def traffic_s(machine: Machine, found: Traffic, itemsize: int) -> float:
    """Return the seconds of a counted move on its slowest rank."""
    size = np.float64(itemsize)
    near = link_s(machine.node, found.near * size, _floats(found.near_messages))
    far = link_s(machine.network, found.far * size, _floats(found.far_messages))
    inside = found.sharers_near == found.sharers
    span = _floats(1 if inside else machine.devices_per_node + 1)
    sums = sum_s(machine, found.summed * size, _floats(found.sharers), span)
    return float((near + far + sums).max(initial=0.0))


def _floats(values: NDArray[np.int64] | int) -> Floats:
    return np.asarray(values, np.float64)
