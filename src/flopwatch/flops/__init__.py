"""What a training step costs: `count` for one batch, `fit` for a law over all batch shapes."""
