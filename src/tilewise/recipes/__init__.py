"""Recipes for `tilewise train`, by name."""
