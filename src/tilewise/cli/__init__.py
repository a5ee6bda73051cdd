"""The command line: one file for each verb."""

from tilewise.cli.app import main

__all__ = ["main"]
