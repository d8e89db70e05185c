"""Lets `python -m flopwatch` work like the command."""

from flopwatch.cli import main

main()
