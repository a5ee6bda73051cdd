"""Plans by themselves: measure this machine and this model, search, try, and split."""

from tilewise.auto.plan import auto_plan, auto_search, parallelize, read_plan

__all__ = ["auto_plan", "auto_search", "parallelize", "read_plan"]
