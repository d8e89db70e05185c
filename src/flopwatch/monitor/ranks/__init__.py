"""Trainings with several ranks: adds up the reports of all ranks, and finds a rank that slows down the others."""
