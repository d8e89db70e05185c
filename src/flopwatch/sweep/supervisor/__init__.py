"""Runs one trial: starts its worker process, enforces its limits and writes its result. Standard library only."""
