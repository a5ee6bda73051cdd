"""Run the lowered program of any rank of any world on one process, and time it on a machine."""

from tilewise.simulate.simulation import Simulation, simulate

__all__ = ["Simulation", "simulate"]
