"""Measurements: ratios of things measured in turn in one run."""
