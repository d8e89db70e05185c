"""Logs the trials of a running sweep: `python -m flopwatch.cli.follow_trials FOLDER OFFSET WANDB MLFLOW`.

A process of its own beside the runner, so that nothing of W&B or MLflow can hold up, slow down or end a sweep. It reads
what the runner appends to results.jsonl and ends when its standard input does: when the sweep is over, or the runner
was killed. Its last line says what became of it.
"""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

from flopwatch.sinks.trial_runs import Logged, TrialLog, TrialRun, log_trials


def main() -> int:
    folder, offset, wandb, mlflow = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None, sys.argv[4] or None
    from flopwatch.cli.trial_tracking import logged_text, open_logs

    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(over,), daemon=True).start()
    _wait_for_plan(folder, over)
    try:
        logs = open_logs(folder, wandb, mlflow)
    except Exception as error:
        _say(f"nothing was logged: {error}")
        return 1
    found = _log_to_all(logs, _runs(folder, offset, over))
    _say("; ".join(logged_text(log.name, logged) for log, logged in zip(logs, found, strict=True)))
    return 1 if any(logged.failures for logged in found) else 0


def _wait_for_end(over: threading.Event) -> None:
    sys.stdin.buffer.read()
    over.set()


def _wait_for_plan(folder: Path, over: threading.Event) -> None:
    """Until the runner holds the folder: a file of ours in it before would make it somebody else's."""
    from flopwatch.trial_files import SWEEP

    while not (folder / SWEEP).exists() and not over.wait(0.1):
        pass


def _runs(folder: Path, offset: int, over: threading.Event) -> Iterator[TrialRun]:
    from flopwatch.report.following import follow_results
    from flopwatch.report.trial_runs import trial_run
    from flopwatch.sweep_reading import read_trial_list

    created = read_trial_list(folder).created
    for result in follow_results(folder, offset, over.is_set):
        yield trial_run(result, folder.resolve().name, created)


def _log_to_all(logs: list[TrialLog], runs: Iterator[TrialRun]) -> list[Logged]:
    """Each service in a thread: one that is slow or away does not keep trials from the other."""
    queues: list[Queue[TrialRun | None]] = [Queue() for _ in logs]
    found: list[Logged] = [Logged(0, (), gave_up=True)] * len(logs)

    def log(place: int) -> None:
        found[place] = log_trials(iter(queues[place].get, None), logs[place])

    threads = [threading.Thread(target=log, args=(place,)) for place in range(len(logs))]
    for thread in threads:
        thread.start()
    for run in runs:
        for queue in queues:
            queue.put(run)
    for queue in queues:
        queue.put(None)
    for thread in threads:
        thread.join()
    return found


def _say(line: str) -> None:
    sys.stdout.buffer.write(line.replace("\n", " ").encode("utf-8", "backslashreplace") + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
