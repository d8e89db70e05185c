"""Trains on several ranks of one CPU whose counters show 100 W, and a share of busy cycles by the rank."""

import json
import sys
import time

import torch
import torch.distributed as dist

import flopwatch
from flopwatch.hardware.counters.sampler import CounterSampler
from flopwatch.monitor.counters import device as device_counters
from flopwatch.records.counters import CounterReading
from flopwatch.testing import FakeCounters


class Meter(FakeCounters):
    def sample(self):
        seconds = time.monotonic()
        return CounterReading("meter", seconds, tensor_active=0.2 * (1 + dist.get_rank()), energy_joules=100 * seconds)


def main(folder):
    dist.init_process_group("gloo")
    device_counters.CounterSampler = lambda device, notify: CounterSampler(
        device, notify, open_source=Meter("meter").open, interval_seconds=0.01
    )
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 16))
    monitor = flopwatch.TrainingMonitor(folder, model=model, mode="hybrid", log_every=10, strict=True, quiet=True)
    for batch in torch.randn(40, 4, 16):
        with monitor.step(batch):
            model(batch).sum().backward()
            time.sleep(0.01)
    monitor.close()
    sys.stdout.write(f"RESULT {json.dumps({'rank': dist.get_rank(), 'newest': monitor.latest})}\n")
    dist.destroy_process_group()


main(sys.argv[1])
