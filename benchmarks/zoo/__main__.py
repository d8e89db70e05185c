"""Counts, laws and padded batches of hundreds of architectures, against real steps; writes docs/zoo.md.

PYTHONPATH=src:benchmarks python -m zoo [--only PATTERN ...] [--family NAME] [--resume] [--workers N] [--table]

Takes more than an hour of processor time; a run that was stopped goes on with --resume. The first run installs
torchvision, timm and diffusers into .cache/zoo.
"""

import argparse
import json
import sys
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console

from zoo import extras
from zoo.families import FAMILIES, family
from zoo.page import PAGE, line, page, summary_table
from zoo.pool import Task, outcomes
from zoo.specimen import Outcome

ROWS = Path(__file__).parent / "rows.jsonl"
"""Committed, so that a run can go on and the page can be made again without counting."""


def main() -> int:
    options = _options()
    extras.install()
    rows = _read(options.rows) if options.resume or options.table else {}
    wanted = [] if options.table else _tasks(options.family, options.only)
    tasks = [task for task in wanted if options.again or task not in _built(rows)]
    console = Console()
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    with options.rows.open("a" if rows else "w") as file:
        for number, row in enumerate(outcomes(tasks, options.workers, options.limit_s), 1):
            rows[row.family, row.name] = row
            print(json.dumps(row.to_json()), file=file, flush=True)
            console.print(f"{number}/{len(tasks)} {line(row)}", highlight=False, markup=False, soft_wrap=True)
    console.print(summary_table(list(rows.values())))
    if options.write:
        not_tried = [task for task in _tasks(None, ["*"]) if task not in rows]
        PAGE.write_text(page(list(rows.values()), not_tried))
    return int(any(cell.status == "wrong" for row in rows.values() for cell in row.cells.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", default=["*"], help="names that match a pattern, as in 'qwen*' '*mamba*'")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="one package; may be given several times")
    parser.add_argument("--resume", action="store_true", help="keep the rows of an earlier run that are there")
    parser.add_argument("--again", action="store_true", help="with --resume: count the chosen ones again")
    parser.add_argument("--table", action="store_true", help="count nothing: write the page of the rows that are there")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds of processor time per architecture")
    parser.add_argument("--rows", type=Path, default=ROWS, help="where the rows go, as JSON lines")
    parser.add_argument("--no-write", dest="write", action="store_false", help="leave docs/zoo.md as it is")
    return parser.parse_args()


def _read(path: Path) -> dict[Task, Outcome]:
    """Later rows of an architecture replace earlier ones."""
    if not path.exists():
        return {}
    rows = [Outcome.from_json(json.loads(text)) for text in path.read_text().splitlines() if text]
    return {(row.family, row.name): row for row in rows}


def _built(rows: dict[Task, Outcome]) -> set[Task]:
    """What was not built is tried again: the builder may have learned it since."""
    return {task for task, row in rows.items() if not row.error}


def _tasks(families: list[str] | None, patterns: list[str]) -> list[Task]:
    """In the order of the patterns."""
    models = [(name, model) for name in families or FAMILIES for model in family(name).names()]
    return list(dict.fromkeys(task for pattern in patterns for task in models if fnmatch(task[1], pattern)))


if __name__ == "__main__":
    sys.exit(main())
