"""Computes the FLOPs of each step from its calls of the model, and checks them by counting some steps as they run."""
