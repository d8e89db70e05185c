"""Where trials run: on this machine, in a Ray cluster, under Slurm."""
