"""Runs one step on a copy of the model and counts it op by op."""
