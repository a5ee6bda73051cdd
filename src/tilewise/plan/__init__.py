"""Which layer is split how."""

from tilewise.plan.plan import Layer, Plan

__all__ = ["Layer", "Plan"]
