"""Run one loop and print what its owner sees: python -m testbeds.stateful LOOP [--door DOOR] [--folder F] [--sinks a,b]

The line that begins with `OBSERVED` is JSON. Without a door it is a training without flopwatch, unless
`flopwatch run -m testbeds.stateful LOOP` has started it.
"""

import argparse
import gc
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from testbeds.stateful import LOOPS, observed
from testbeds.stateful.doors import open_door


def observe(name: str, door: str, folder: Path, sinks: list[str]) -> dict[str, Any]:
    """Train, and look at everything; the monitor of door `step` is closed before its model is deleted."""
    seed()
    run = open_door(door, folder, sinks)
    kept = LOOPS[name](run)
    seen: dict[str, Any] = {
        "random states": observed.random_states(),
        "weights": observed.weights_of(kept.modules),
        "state": observed.describe(kept.state),
        "attributes": observed.attributes_of(kept.modules),
        "forward calls": dict(observed.forward_calls),
    }
    if door in ("plain", "step"):
        run.close()
        seen["hooks"] = observed.hooks_of(kept.modules)
    of_it = observed.references(kept)
    del kept
    gc.collect()
    seen["alive after del"] = sum(reference() is not None for reference in of_it)
    run.close()
    gc.collect()
    seen["live tensors"] = observed.live_tensors()
    seen["settings"] = observed.settings()
    return seen


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loop", choices=list(LOOPS))
    parser.add_argument("--door", default="plain")
    parser.add_argument("--folder", type=Path, default=Path("stateful"))
    parser.add_argument("--sinks", default="")
    options = parser.parse_args()
    sinks = [sink for sink in options.sinks.split(",") if sink]
    seen = observe(options.loop, options.door, options.folder, sinks)
    print("OBSERVED", json.dumps(seen), flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
