"""Computes each step's FLOPs from its model calls, and checks them by counting the FLOPs of some steps as they run."""
