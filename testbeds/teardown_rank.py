"""One rank of a tiny training that is torn down at a random moment, with or without the monitor.

Forked by `benchmarks/ranks/teardowns.py`. The rank appends to its output file what it has come to, one word per line;
when it is done it returns, so that the interpreter ends as it does at the end of a user's script.
"""

import atexit
import datetime as dt
import os
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist

STEPS = 24
WINDOW_STEPS = 4
STEP_SECONDS = 0.02
EXIT_CODE = 3
"""Of a script that leaves by `sys.exit` before its end."""
CHILD_SECONDS = 20.0
"""A forked process that has not ended by then counts as hanging."""
LONGER_SECONDS = 0.3
"""How much longer the other rank runs if one ends before its time."""
_kept = []
"""A script's monitor is a global variable more often than not, and there until the process ends."""


class LeavesError(Exception):
    """Raised to leave the loop at the random moment."""


def main(case, rank) -> None:
    """Run one rank of `case` (a `Teardown` of the benchmark)."""
    torch.set_num_threads(1)
    start_group(case, rank)
    model = make_model(case)
    monitor = make_monitor(case, rank, model)
    _kept.append(monitor)
    say("STARTED")
    try:
        train(case, rank, model, monitor)
        if not case.is_forgotten:
            say("CLOSING")
            close(monitor)
            say("CLOSED")
        act(case, rank, STEPS)
    except LeavesError:
        leave(case, monitor)
        return
    if case.kind == "exit":
        time.sleep(LONGER_SECONDS)
    say("DONE")


def start_group(case, rank) -> None:
    if case.has_fake_group:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world_size)
    else:
        dist.init_process_group("gloo", timeout=dt.timedelta(seconds=60))


def make_model(case) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
    return torch.nn.parallel.DistributedDataParallel(model) if case.has_ddp else model


def make_monitor(case, rank, model):
    if case.mode == "bare":
        return None
    import flopwatch

    settings = {"log_every": WINDOW_STEPS}
    return flopwatch.TrainingMonitor(
        case.folder / "run", config={"flopwatch": settings}, model=model, peak_flops_per_s=1e12
    )


def train(case, rank, model, monitor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        batch = torch.randn(4, 16)
        with monitor.step(batch, step=step) if monitor is not None else nullcontext() as noted:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(STEP_SECONDS)
            act(case, rank, step)
            if noted is not None:
                noted.log(loss=loss)
        say(f"STEP {step}")


def act(case, rank, step: int) -> None:
    """Do what this kind of teardown does by itself, if this is the step for it; `STEPS` is after the loop."""
    if case.kind not in ("fake", "exit", "fork") or rank != case.acting_rank or step != int(case.moment_share * STEPS):
        return
    time.sleep(case.child_seconds / 10)
    say("ACTS")
    if case.kind != "fork":
        raise LeavesError
    fork(case)


def leave(case, monitor) -> None:
    """End the script before its time, in one of the ways scripts do."""
    if case.way == "closed":
        close(monitor)
    elif case.way == "raises":
        raise KeyError("a mistake in the training")
    elif case.way == "exits":
        sys.exit(EXIT_CODE)


def close(monitor) -> None:
    if monitor is not None:
        monitor.close()


def fork(case) -> None:
    if case.way == "worker":
        data = torch.utils.data.TensorDataset(torch.randn(6, 2))
        for _ in torch.utils.data.DataLoader(data, num_workers=1, batch_size=2, multiprocessing_context="fork"):
            pass
        say("CHILD 0")
        return
    child = os.fork()
    if child == 0:
        time.sleep(case.child_seconds)
        if case.way == "child_returns":
            sys.exit(0)  # the whole end of the interpreter
        if case.way == "child_runs_atexit":
            atexit._run_exitfuncs()
        os._exit(0)
    ends = time.monotonic() + CHILD_SECONDS
    while time.monotonic() < ends:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            say(f"CHILD {os.waitstatus_to_exitcode(status)}")
            return
        time.sleep(0.01)
    say("CHILD hangs")
    os.kill(child, 9)
    os.waitpid(child, 0)


def say(line: str) -> None:
    os.write(1, line.encode() + b"\n")
