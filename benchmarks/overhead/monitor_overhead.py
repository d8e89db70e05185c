"""What does watching a training cost? flopwatch and the monitors people use today, in turns with the bare loop.

    python benchmarks/overhead/monitor_overhead.py                       # everything; writes the page
    python benchmarks/overhead/monitor_overhead.py --quick --parts free  # a short look; writes nothing
    python benchmarks/overhead/monitor_overhead.py --parts rivals        # that part again, the rest as measured last

Only ratios of neighbouring turns count: the machine may be busy with other things.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from accuracy.rivals_venv import PYTHON, prepare
from overhead.contenders.tools import MONITORS
from overhead.overhead_page import section, terminal_tables, write_section
from overhead.training_loop import LARGE, SMALL, Schedule, Size, calibrated

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PARTS = ("free", "hybrid", "frequency", "rivals", "harm", "instructions")
FREE_SECONDS, QUICK_FREE_SECONDS = 0.2, 0.05
CHEAP_SECONDS = 0.025
FREE = Schedule(repeats=40, steps=15)
LONG_STEPS = Schedule(repeats=30, steps=10)
SHORT_STEPS = Schedule(repeats=40, steps=20, turn=10)
FREQUENCIES = {
    1: Schedule(repeats=12, steps=10),
    10: Schedule(repeats=16, steps=20, turn=10),
    50: Schedule(repeats=10, steps=50, turn=10),
    100: Schedule(repeats=8, steps=100, turn=10),
    500: Schedule(repeats=4, steps=500, turn=10),
}
"""By measuring frequency: every repeat has at least one measured step."""
QUICK_FREE = Schedule(repeats=3, steps=10)
QUICK_FREQUENCIES = {1: Schedule(repeats=2, steps=4), 10: Schedule(repeats=2, steps=10)}
TABLE_WIDTH = 150


def main() -> None:
    arguments = _arguments()
    console = Console()
    if arguments.rivals and not arguments.quick and {"frequency", "rivals", "harm"} & set(arguments.parts):
        prepare(console.print)
    store = {} if arguments.quick or not arguments.results.exists() else json.loads(arguments.results.read_text())
    torch.set_num_threads(1)
    for part in arguments.parts:
        console.print(f"Measuring: {part}")
        store[part] = MEASURE[part](arguments)
        store |= {"date": date.today().isoformat(), "load": os.getloadavg()}
        if not arguments.quick:
            arguments.results.parent.mkdir(parents=True, exist_ok=True)
            arguments.results.write_text(json.dumps(store))
    wide = Console(width=max(console.width, TABLE_WIDTH))
    for table in terminal_tables(store):
        wide.print(table)
    if arguments.quick:
        return
    missing = [part for part in PARTS if part not in store]
    if missing:  # the page would lose what it says of them
        console.print(f"Wrote no page: {arguments.results} has no measurement of {', '.join(missing)}")
        return
    write_section(arguments.page, section(store))
    console.print(f"Wrote {arguments.page}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats, short steps, no tools from PyPI")
    parser.add_argument("--parts", type=_chosen, default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--no-rivals", dest="rivals", action="store_false", help="leave out the tools from PyPI")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "overhead.json", help="what was measured last")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "overhead.md")
    return parser.parse_args()


def _chosen(names: str) -> list[str]:
    unknown = set(names.split(",")) - set(PARTS)
    if unknown:
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return [part for part in PARTS if part in names.split(",")]


def _free(arguments: argparse.Namespace) -> Any:
    if arguments.quick:
        return _work(sys.executable, QUICK_FREE, part="free", size=calibrated(LARGE, QUICK_FREE_SECONDS), calls=500)
    return _work(sys.executable, FREE, part="free", size=calibrated(LARGE, FREE_SECONDS))


def _hybrid(arguments: argparse.Namespace) -> Any:
    if arguments.quick:
        return _work(sys.executable, QUICK_FREE, part="hybrid", size=calibrated(LARGE, QUICK_FREE_SECONDS))
    return _work(sys.executable, FREE, part="hybrid", size=calibrated(LARGE, FREE_SECONDS))


def _frequency(arguments: argparse.Namespace) -> Any:
    size = calibrated(SMALL, CHEAP_SECONDS)
    rivals = arguments.rivals and not arguments.quick
    python = PYTHON if rivals else sys.executable
    return {
        every: _work(python, schedule, part="frequency", size=size, every=every, rivals=rivals)
        for every, schedule in (QUICK_FREQUENCIES if arguments.quick else FREQUENCIES).items()
    }


def _rivals(arguments: argparse.Namespace) -> Any:
    return {
        "short": _work(PYTHON, SHORT_STEPS, part="rivals", size=calibrated(SMALL, CHEAP_SECONDS)),
        "long": _work(PYTHON, LONG_STEPS, part="rivals", size=calibrated(LARGE, FREE_SECONDS)),
    }


def _harm(arguments: argparse.Namespace) -> Any:
    def one(tool: str, is_compiled: bool) -> Any:
        return _work(PYTHON, None, part="harm", size=SMALL, tool=tool, is_compiled=is_compiled)

    return {tool.name: [one(tool.name, False), one(tool.name, True)] for tool in MONITORS}


def _instructions(arguments: argparse.Namespace) -> Any:
    return json.loads(_output([sys.executable, str(HERE / "instructions.py")]))


MEASURE = {
    "free": _free,
    "hybrid": _hybrid,
    "frequency": _frequency,
    "rivals": _rivals,
    "harm": _harm,
    "instructions": _instructions,
}


def _work(python: str, schedule: Schedule | None, *, size: Size, **plan: Any) -> Any:
    if schedule is not None:
        plan["schedule"] = asdict(schedule)
    with tempfile.TemporaryDirectory(prefix="flopwatch-overhead-") as folder:
        text = json.dumps({"size": asdict(size), "folder": folder, **plan})
        return json.loads(_output([python, str(HERE / "overhead_worker.py"), text]))


def _output(command: list[str]) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("src", "benchmarks", ".")),
        "PYTHONWARNINGS": "ignore",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "KINETO_LOG_LEVEL": "99",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
