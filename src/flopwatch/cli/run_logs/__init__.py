"""The commands that read the log of a run: `watch`, `why`, `trace`, `explain`, `compare`, and `report` of a run."""
