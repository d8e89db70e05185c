"""Runs one step on a copy of the model and counts its FLOPs op by op."""
