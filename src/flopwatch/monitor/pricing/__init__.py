"""What a step costs: the calls of the model, the laws they follow, and steps that were counted as they ran."""
