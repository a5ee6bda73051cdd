"""Run the lowered program of any rank of any world on one process, and time it on a machine."""

from tilewise.simulate.plain import as_dict
from tilewise.simulate.simulation import Simulation, simulate
from tilewise.simulate.sweep import Point, Sweep

__all__ = ["Point", "Simulation", "Sweep", "as_dict", "simulate"]
