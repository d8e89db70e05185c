"""The machine that runs a trial: its processes, memory, devices and library versions. Standard library only."""
