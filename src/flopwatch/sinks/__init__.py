"""Where a run's records go: the local log, the console, TensorBoard, W&B, MLflow, Prometheus, or your own sink."""

from flopwatch.sinks.protocol import Sink

__all__ = ["Sink"]
