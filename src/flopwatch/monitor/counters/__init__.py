"""Hardware counters of the training's device: their metrics, energy, and the alarm if they and the count disagree."""
