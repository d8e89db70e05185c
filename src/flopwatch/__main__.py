"""Runs the command line as `python -m flopwatch`."""

from flopwatch.cli import main

main()
