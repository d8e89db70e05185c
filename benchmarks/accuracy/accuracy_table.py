"""How right are the FLOP counts of one training step? 26 architectures, flopwatch and what people use today.

python benchmarks/accuracy/accuracy_table.py  # everything; writes the page and the picture
python benchmarks/accuracy/accuracy_table.py --architectures llama,mixtral --no-rivals  # a quick look; writes nothing
"""

import argparse
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from accuracy.accuracy_page import notes, section, terminal_table, write_section
from accuracy.accuracy_picture import picture
from accuracy.columns import RIVALS
from accuracy.counters import BATCH_SIZE, COUNTERS, SEQ_LEN, count, live_flops, outcome, truth_flops
from accuracy.outcomes import Results
from accuracy.rivals_venv import count_with, prepare
from testbeds.architectures import ARCHITECTURES, BY_NAME, Architecture

ROOT = Path(__file__).parents[2]
TABLE_WIDTH = 152
"""A pipe has no width of its own, and 80 columns cannot hold the table."""

Tick = Callable[[str, int], None]


def main() -> None:
    arguments = _arguments()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler reports every start and stop
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    console = Console()
    if arguments.rivals:
        prepare(console.print)
    truths, results = _measure(arguments.architectures, RIVALS if arguments.rivals else [], console)
    wide = Console(width=max(console.width, TABLE_WIDTH))
    wide.print(terminal_table(truths, results), *notes(truths, results), sep="\n")
    console.print(_live_counts(arguments.architectures, truths))
    if arguments.architectures == ARCHITECTURES and arguments.rivals:
        write_section(arguments.page, section(truths, results))
        arguments.picture.parent.mkdir(parents=True, exist_ok=True)
        arguments.picture.write_text(picture(truths, results))
        console.print(f"Wrote {arguments.page} and {arguments.picture}")
    else:
        console.print("Part of the table only: the page and the picture stay as they are")


def _live_counts(architectures: list[Architecture], truths: dict[str, int]) -> str:
    """How many architectures have the true FLOPs when one real step is counted as it runs."""
    counts = {each.name: outcome(live_flops, each) for each in architectures}
    wrong = [f"{name}: {each}" for name, each in counts.items() if each.flops != truths[name]]
    return "\n".join([f"Live counts: {len(counts) - len(wrong)} of {len(counts)} agree with the truth", *wrong])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", type=_chosen, default=ARCHITECTURES, help="names, separated by commas")
    parser.add_argument("--no-rivals", dest="rivals", action="store_false", help="leave out the tools from PyPI")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "accuracy.md")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs" / "pictures" / "accuracy.svg")
    return parser.parse_args()


def _chosen(names: str) -> list[Architecture]:
    unknown = set(names.split(",")) - set(BY_NAME)
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no such architecture: {', '.join(sorted(unknown))}; there are {', '.join(BY_NAME)}"
        )
    return [BY_NAME[name] for name in names.split(",")]


def _measure(architectures: list[Architecture], rivals: list[str], console: Console) -> tuple[dict[str, int], Results]:
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(architectures) * (1 + len(COUNTERS) + len(rivals)))

        def tick(description: str, advance: int) -> None:
            progress.update(task, description=description, advance=advance)

        truths, results = _count_here(architectures, tick)
        for rival in rivals:
            tick(rival, 0)
            names = [architecture.name for architecture in architectures]
            results |= count_with(rival, names, (BATCH_SIZE, SEQ_LEN))
            tick(rival, len(architectures))
    return truths, results


def _count_here(architectures: list[Architecture], tick: Tick) -> tuple[dict[str, int], Results]:
    truths: dict[str, int] = {}
    results: Results = {tool: {} for tool in COUNTERS}
    for architecture in architectures:
        tick(f"{architecture.name}: truth", 1)
        truths[architecture.name] = truth_flops(architecture)
        for tool in COUNTERS:
            tick(f"{architecture.name}: {tool}", 1)
            results[tool][architecture.name] = count(tool, architecture)
    return truths, results


if __name__ == "__main__":
    main()
