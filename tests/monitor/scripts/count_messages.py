"""40 steps of DDP with or without the monitor; each rank prints what it asked of c10d, and what the monitor did.

Run by tests/monitor/ranks/test_silent.py under torchrun. What the training asked of c10d is read from torch's own
flight recorder, which notes every collective of registered groups.
"""

import json
import os
import pickle
import sys
import threading
from collections import Counter

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

import flopwatch
from flopwatch.monitor.ranks import job_store
from flopwatch.monitor.ranks.reports import Message
from support.forbidden_calls import forbidden_calls

STEPS, WINDOW_STEPS = 40, 10
messages: list[tuple[str, int, int, str]] = []
"""Kind, bytes, reports, thread."""


def note(kind: str, message: Message) -> None:
    messages.append((kind, len(message.to_json()), len(message.reports), threading.current_thread().name))


def count_messages() -> None:
    """Note what is written and read between ranks; the flight recorder sees only the training's groups."""
    write, read = job_store.StoreOutbox.write, job_store.read_slots

    def noted_write(outbox: job_store.StoreOutbox, message: Message) -> None:
        write(outbox, message)
        note("write", message)

    def noted_read(store: object, ranks: list[int]) -> dict[int, Message]:
        found = read(store, ranks)
        for each in found.values():
            note("read", each)
        return found

    job_store.StoreOutbox.write, job_store.read_slots = noted_write, noted_read


def main(is_monitored: bool, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    count_messages()
    torch.manual_seed(dist.get_rank())
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    monitor = flopwatch.TrainingMonitor(folder, model=model, log_every=WINDOW_STEPS, strict=True)
    forbidden: dict[int, list[str]] = {}
    for step in range(STEPS):
        batch = torch.randn(4, 64)
        model(batch).sum().backward()
        if is_monitored:
            with forbidden_calls() as calls:
                monitor.log_step(step, batch=batch)
            forbidden[step] = list(calls)
    if is_monitored:
        monitor.close()
    entries = pickle.loads(c10d._dump_fr_trace(True, False, False))["entries"]
    asked = Counter(f"{e['process_group'][1]} {e['profiling_name']} {e['input_sizes']}" for e in entries)
    result = {"rank": dist.get_rank(), "asked": asked, "messages": messages, "forbidden": forbidden}
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # torch 2.13 can hang in the teardown of gloo


if __name__ == "__main__":
    main(sys.argv[1] == "monitored", sys.argv[2])
