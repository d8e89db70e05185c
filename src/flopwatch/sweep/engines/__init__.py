"""The engines, which run trials on this machine, in a Ray cluster or under Slurm."""
