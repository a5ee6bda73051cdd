"""Run the command line as `python -m tilewise`."""

from tilewise.cli import main

main()
