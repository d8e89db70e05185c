"""Runs one trial: starts its worker, watches it, and writes its result. Standard library only."""
