"""The live monitor: every step of a training is noted, settled, priced, booked, and becomes part of a row."""
