"""This machine: processes, memory, and what a trial runs on. Standard library only."""
