"""The names of the files in a sweep's folder. Standard library only.

DIR/
  sweep.json            every trial of the sweep, in the order of the matrix
  results.jsonl         one result per line, appended by the runner as trials end
  runners/              N.runner: the process that runs the sweep; of several files the one with the highest number
  runner.json           process and progress of the latest runner
  report.html           written by `flopwatch report`
  trials/NAME/          spec.json, started.json, heartbeat.json, steps.jsonl, measured.json, exception.json,
                        stacks.txt, result.json; metrics.json of a command
  logs/NAME.log         what the trial printed; of more than 8 MiB the beginning and the end
  runs/NAME/            TensorBoard scalars and the Kineto trace
  earlier/NAME.1/       an earlier attempt: its trials/NAME, its log as log.txt, its runs/NAME as run
"""

from pathlib import Path

SWEEP = "sweep.json"
RESULTS = "results.jsonl"
RUNNERS = "runners"
RUNNER = "runner.json"

TRIALS, LOGS, RUNS, EARLIER = "trials", "logs", "runs", "earlier"

SPEC = "spec.json"
STARTED = "started.json"
"""Written by the supervisor process that runs the trial, so that no other supervisor starts the same trial.

The supervisor touches it every few seconds; `heartbeat.json` is the worker's."""
HEARTBEAT = "heartbeat.json"
STEPS = "steps.jsonl"
MEASURED = "measured.json"
EXCEPTION = "exception.json"
METRICS = "metrics.json"
"""Written by the command of a `command` trainer, with any numbers that the report should show."""
STACKS = "stacks.txt"
RANKS = "ranks.json"
"""How the processes of a trial ended that torchrun started."""
RESULT = "result.json"

KEPT_LOG, KEPT_RUN = "log.txt", "run"
"""Names of a trial's log and run folder inside `earlier/NAME.1/`."""


def trial_folder(sweep: Path, name: str) -> Path:
    return sweep / TRIALS / name


def log_file(sweep: Path, name: str) -> Path:
    return sweep / LOGS / f"{name}.log"


def run_folder(sweep: Path, name: str) -> Path:
    return sweep / RUNS / name


def of_rank(file: str, rank: int) -> str:
    """The name of a file that every rank writes for itself; the name for rank 0 has no number.

    >>> of_rank("measured.json", 0), of_rank("measured.json", 3)
    ('measured.json', 'measured-3.json')
    """
    stem, _, ending = file.partition(".")
    return f"{stem}-{rank}.{ending}" if rank else file


def exception_file(rank: int) -> str:
    """The name of the file that a rank writes when it raises an exception.

    The name has a number for rank 0 too, because `exception.json` is a copy of the file of the rank that failed first.
    """
    return f"exception-{rank}.json"
