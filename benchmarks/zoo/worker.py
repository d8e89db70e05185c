"""One process of the pool: reads `family name` lines, writes one JSON line per architecture.

Models write to stdout as they please, so the answers go through a copy of it made before any of them was loaded.
"""

import json
import logging
import os
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


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for line in sys.stdin:
        family_name, name = line.split()
        print(json.dumps(outcome(family_name, name).to_json()), file=answers, flush=True)


if __name__ == "__main__":
    main()
