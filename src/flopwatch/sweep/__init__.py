"""Measures a matrix of trainers, models and batch sizes, every trial in a process of its own."""
