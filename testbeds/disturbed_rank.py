"""One rank of a DDP training to which something happens, with or without the monitor.

Started by `testbeds.disturbed_training` in a process for each rank; torchrun would end the others itself when one
dies.
Prints one line of JSON behind the word RESULT: how far it came, what it raised and where, its parameters.
"""

import datetime as dt
import hashlib
import json
import os
import re
import signal
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist

from testbeds.disturbed_training import DISTURBED_STEP, GONE, STEPS, TO_THE_TRAINING, WINDOW_STEPS

PLAN_STEP = 2 * WINDOW_STEPS + 1
"""By then the logging rank has told how long windows are: its second window says how long its warm-up was."""
_SLEEP_SECONDS = 0.02
_kept = []
"""A script's monitor is a global variable more often than not, and there until the process ends."""


def main(case: str, mode: str, folder: str, timeout_seconds: float) -> None:
    """Takes its rank from the environment, as torchrun would set it."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=dt.timedelta(seconds=timeout_seconds))
    model = make_model()
    monitor = make_monitor(case, mode, folder, rank, model)
    if case == "never_closed":
        _kept.append(monitor)
    result = {"rank": rank, "mode": mode, **train(case, rank, model, monitor)}
    result["close_seconds"] = end(case, monitor)
    result["told"] = told(monitor)
    result["parameters"] = hash_of(model)
    say("RESULT " + json.dumps(result))
    if case == "forgotten_while_the_other_dies" and rank == 1:
        time.sleep(0.2)  # rank 0 is being taken down then
        os._exit(0)
    # From here on the process has to end by itself: no os._exit.


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32)]
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))


def make_monitor(case, mode, folder, rank, model):
    """None where this case has none on this rank."""
    if mode == "bare" or case == f"made_only_on_{1 - rank}":
        return None
    import flopwatch

    break_monitor(case, rank)
    settings = {"log_every": WINDOW_STEPS, "detailed_log_every": WINDOW_STEPS}  # the ranks are told of in every row
    return flopwatch.TrainingMonitor(folder, config={"flopwatch": settings}, model=model)


def break_monitor(case: str, rank: int) -> None:
    """The monitor of one rank fails from the disturbed step on."""
    from flopwatch.monitor.ranks import exchange, job_store
    from flopwatch.monitor.run import MonitoredRun

    def fails(*_args, **_options):
        raise ValueError("broken by the test")

    note = MonitoredRun.note_step

    def note_until(self, step, *arguments):
        return (fails if step >= DISTURBED_STEP else note)(self, step, *arguments)

    own = exchange.Exchange._own_reports

    def own_until(self):
        for report in own(self):
            if report.last_step >= DISTURBED_STEP:
                fails()
            yield report

    if case == f"note_step_raises_on_{rank}":
        MonitoredRun.note_step = note_until
    if case == f"thread_raises_on_{rank}":
        exchange.Exchange._own_reports = own_until
    if case == f"thread_never_starts_on_{rank}":
        exchange.RankLink._run = lambda self: None
    if case == f"no_connection_on_{rank}":
        job_store.find_job_store = fails


def train(case, rank, model, monitor) -> dict:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    at = {"step": 0, "call": "none"}
    error = None
    try:
        for step in range(STEPS):
            at["step"] = step
            batch = torch.randn(4 + (step + rank) % 3, 32, generator=generator)
            with monitor.step(batch, step=step) if monitor is not None else nullcontext() as noted:
                at["call"] = "forward"
                loss = model(batch).square().mean()
                if step == PLAN_STEP and rank == 1 and monitor is not None and case in TO_THE_TRAINING:
                    # On a busy machine the monitors might else find each other after the disturbance only.
                    assert monitor._run.ranks.link.wait_for_plan(30.0)
                if step == DISTURBED_STEP:
                    disturb(case, rank, monitor)
                at["call"] = "backward"
                loss.backward()
                at["call"] = "optimizer"
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(_SLEEP_SECONDS)
                if noted is not None:
                    at["call"] = "the monitor"
                    noted.log(loss=loss)
    except Exception as raised:
        error = {"type": type(raised).__name__, "message": without_addresses(str(raised)), "call": at["call"]}
    steps_done = STEPS if error is None else at["step"]
    return {"steps_done": steps_done, "error": error}


def disturb(case: str, rank: int, monitor) -> None:
    say(f"AT {DISTURBED_STEP}")
    if case == f"killed_{rank}":
        os.kill(os.getpid(), signal.SIGKILL)
    if case.startswith("stopped") and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if case == f"raises_on_{rank}":
        raise KeyError("a mistake in the training")
    if case == f"closed_early_on_{rank}" and monitor is not None:
        monitor.close()


def end(case: str, monitor) -> float:
    """Seconds in close()."""
    if case == "destroyed_before_close":
        dist.destroy_process_group()
    began = time.monotonic()
    if monitor is not None and case not in ("never_closed", "forgotten_while_the_other_dies"):
        monitor.close()
    seconds = time.monotonic() - began
    if case == "destroyed_after_close":
        dist.destroy_process_group()
    return seconds


def told(monitor) -> list[str]:
    """What the monitor said of itself."""
    if monitor is None or monitor.summary is None:
        return []
    return list(monitor.summary.notices)


def without_addresses(message: str) -> str:
    """Also without the line of gloo's source, and in one wording for a rank that is gone: gloo has two, by chance."""
    message = re.sub(r"^\[/\S+:\d+\] ", "", message)
    message = re.sub(r"\[[0-9a-fA-F.:]+\]:\d+", "ADDRESS", message)
    return re.sub(r"^(Connection closed by peer|Read error|writev?) .*", GONE, message)


def hash_of(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
