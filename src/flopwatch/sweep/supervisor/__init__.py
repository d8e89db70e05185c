"""Runs one trial: starts its worker process, enforces its limits and writes its result. Uses no third-party package."""
