"""Stands in front of an `amdsmi` that is installed without ROCm: see `ray_start.py`."""

raise ImportError("amdsmi is installed, but it cannot load ROCm's libamd_smi.so")
