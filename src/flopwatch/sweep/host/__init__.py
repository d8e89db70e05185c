"""The machine we run on: processes, memory, and what a trial runs on. Standard library only."""
