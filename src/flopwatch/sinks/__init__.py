"""Sinks write the records of a run: to the local log, the console, TensorBoard, W&B, MLflow or Prometheus."""

from flopwatch.sinks.protocol import Sink

__all__ = ["Sink"]
