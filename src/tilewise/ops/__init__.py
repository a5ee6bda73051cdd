"""Operators on split tensors: one file for each family.

An operator is planned from layouts alone (an `Operation`), then bound to a mesh and run on plain
local tensors. `pointwise.py` is the shortest example, `conv.py` the richest.
"""
