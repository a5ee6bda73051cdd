"""Choose a candidate for each layer so that the step is fastest, and prove it."""

from tilewise.planner.solve.answer import solve
from tilewise.planner.solve.descend import Descent
from tilewise.planner.solve.evaluate import Cost, evaluate
from tilewise.planner.solve.memory import InfeasibleError, LeastMemory, least_memory
from tilewise.planner.solve.pricing import Prices, price, prices
from tilewise.planner.solve.problem import Consumer, Moves, Problem, Tie, Transfer, Variable
from tilewise.planner.solve.solution import Solution

__all__ = [
    "Consumer",
    "Cost",
    "Descent",
    "InfeasibleError",
    "LeastMemory",
    "Moves",
    "Prices",
    "Problem",
    "Solution",
    "Tie",
    "Transfer",
    "Variable",
    "evaluate",
    "least_memory",
    "price",
    "prices",
    "solve",
]
