"""A sink of your own: an object with `name`, `write`, `flush` and `close`. This one writes a CSV file.

python examples/extending/custom_sink.py
"""

import csv
from pathlib import Path

import torch

import flopwatch
from flopwatch.records.run import Record, Row, Summary

COLUMNS = ("training/loss", "perf/step_time", "perf/samples_per_second", "perf/mfu")


class CsvSink:
    """Every method runs in a thread of its own. If one raises, this sink is switched off and the training goes on."""

    name = "csv"

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="")
        self._table = csv.writer(self._file)
        self._table.writerow(["step", *COLUMNS])

    def write(self, record: Record) -> None:
        if isinstance(record, Row):  # a value that is not known is not in the row
            self._table.writerow([record.step, *(record.values.get(column, "") for column in COLUMNS)])
        elif isinstance(record, Summary):
            print(f"The sink saw the end of the run at step {record.step}.")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


path = Path("runs/custom_sink/metrics.csv")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with flopwatch.TrainingMonitor(path.parent, model=model, sinks=[CsvSink(path)], log_every=10) as monitor:
    for _ in range(50):
        batch = torch.randn(32, 64)
        with monitor.step(batch) as step:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)

rows = list(csv.DictReader(path.open()))
print(f"{path} has {len(rows)} rows, one for every 10 steps.")
print(f"The loss fell from {float(rows[0]['training/loss']):.3f} to {float(rows[-1]['training/loss']):.3f}.")
