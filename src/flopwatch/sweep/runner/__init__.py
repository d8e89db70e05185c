"""Runs all trials of a plan on an engine, and records their results."""
