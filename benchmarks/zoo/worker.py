"""One process of the pool, `python -m zoo.worker SECONDS`: reads `family name` lines, answers each with a JSON line.

Models write to stdout as they please, so the answers go through a copy of it made before any of them was loaded.
"""

import json
import logging
import os
import resource
import signal
import sys
import time
import traceback
import warnings

import torch

from zoo.examine import examine
from zoo.families import family
from zoo.specimen import Outcome


def outcome(family_name: str, name: str) -> Outcome:
    """Builds and examines one architecture."""
    started = time.process_time()
    try:
        specimen = family(family_name).specimen(name)
    except Exception as error:
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {' '.join(lines)[:160] if lines else ''}"
        if os.environ.get("ZOO_DEBUG"):
            traceback.print_exc()
        return Outcome(name, family_name, error=reason, seconds=_since(started))
    cells = examine(specimen)
    return Outcome(name, family_name, specimen.kind, seconds=_since(started), cells=cells)


def _since(started: float) -> float:
    return round(time.process_time() - started, 1)


def _limit_processor_time(limit_s: float) -> None:
    """The kernel ends this process (SIGXCPU) when it has used so much more."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + limit_s) + 1, hard))


def main() -> None:
    limit_s = float(sys.argv[1])
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for line in sys.stdin:
        family_name, name = line.split()
        _limit_processor_time(limit_s)
        print(json.dumps(outcome(family_name, name).to_json()), file=answers, flush=True)


if __name__ == "__main__":
    main()
