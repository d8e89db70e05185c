"""Trainings that use `torch.compile` in different ways."""
