"""Runs one step on a stand-in of the model and counts it op by op; knows nothing of how batches are made."""
