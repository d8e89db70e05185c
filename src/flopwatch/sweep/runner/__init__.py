"""Runs the trials of a sweep on an engine and records their results."""
