"""How a step is made: the built-in trainers, their batches, losses and options."""
