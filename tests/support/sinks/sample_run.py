"""A run as a sink sees it: every kind of record, every key, and every number that ever broke a writer."""

import math

from flopwatch.records.metrics import METRICS
from flopwatch.records.run import Notice, Provenance, Row, RunStart, Summary

STARTED_AT = 1_790_000_000.25

START = RunStart(
    session="5e55104",
    unix_time=STARTED_AT,
    output_dir="outputs",
    total_steps=60,
    config={"mode": "smart", "log_every": 10},
    environment={"torch": "2.13.0"},
)
ORIGIN = Provenance(
    step=1,
    mode="smart",
    method="trace",
    exact=True,
    attention="full",
    coverage=1.0,
    peak={"flops_per_s": 989.4e12, "device": "NVIDIA H100 80GB HBM3", "dtype": "bf16", "kind": "datasheet"},
    device_count=8,
    notes=("padding is not counted",),
)
WARNING = Notice(30, "warning", "mfu_above_peak", "MFU was 1.21 [bf16] at step 30; check the step time")
DATASET_KEYS = ("dataset/code/loss", "dataset/code/accuracy", "dataset/code/samples", "dataset/数学 (zh)/loss")
USER_KEYS = ("training/temperature", "my metric!")
EVERY_KEY = (*METRICS, *DATASET_KEYS, *USER_KEYS)


def basic_row(step, **more):
    values = {key: 0.1 + 0.37 * step + index for index, key in enumerate(METRICS) if METRICS[key].basic}
    columns = {"step": list(range(step - 9, step + 1)), "seconds": [0.2] * 10, "loss": [2.5] * 9 + [None]}
    return Row(step, STARTED_AT + step / 5, {**values, "total/tokens": 4096 * step, **more}, steps=columns)


def detailed_row(step, **more):
    values = {key: 0.1 + 0.73 * step + index for index, key in enumerate(EVERY_KEY)}
    totals = {"total/model_flops": 2**70 + step, "total/hardware_flops": 2**71, "total/tokens": 4096 * step}
    return Row(step, STARTED_AT + step / 5, {**values, **totals, **more}, detailed=True)


def rows():
    without_loss = basic_row(40)
    return [
        basic_row(10),
        basic_row(20, **{"training/loss": math.nan}),
        basic_row(30, **{"training/loss": math.inf, "training/temperature": -math.inf}),
        Row(40, without_loss.unix_time, {"perf/step_time": 0.25}),
        detailed_row(50),
        basic_row(60),
    ]


def summary():
    values = {"total/steps": 60, "perf/mfu_percent": 41.5, "total/model_flops": 2**70, "training/loss": math.nan}
    return Summary(60, STARTED_AT + 13, values, {"mfu_above_peak": 1}, {"mlflow": "connection refused"}, {"wandb": 3})


def records():
    first, *others = rows()
    return [START, ORIGIN, first, WARNING, *others, summary()]
