"""Plans by themselves: measure this machine and this model, search, and split."""

from tilewise.auto.plan import auto_search, parallelize, read_plan

__all__ = ["auto_search", "parallelize", "read_plan"]
