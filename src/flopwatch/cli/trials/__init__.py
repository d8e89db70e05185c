"""The commands that run trials: `trial`, `fit`, `sweep`."""
