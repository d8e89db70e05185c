"""Trainings that cost something else from some late step on, and whether the monitor notices."""
