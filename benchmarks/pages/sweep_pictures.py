"""Make the pictures of the sweep: the documents' matrix runs on this machine, its live table and its report are drawn.

    python benchmarks/pages/sweep_pictures.py [FOLDER]

Sixteen trials of the preset `small`, about a quarter of an hour on two cores; chromium draws the page. The sweep
stays in FOLDER, if one is named.
"""

import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text

from flopwatch.cli.trials.sweep_screens import LiveTable
from flopwatch.sweep.engines.local import LocalEngine
from flopwatch.sweep.folder import Trial, held_folder, write_trial_list
from flopwatch.sweep.preflight import run_preflight
from flopwatch.sweep.runner.observing import Stop
from flopwatch.sweep.runner.plan import Plan, make_plan
from flopwatch.sweep.runner.run import run_plan
from flopwatch.sweep.spec.matrix import expand, read_matrix
from flopwatch.sweep.spec.parsing import parse_overrides

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
WIDTH = 92
COMMAND = (
    "flopwatch sweep trainer=standard,dpsgd,ghost,fast batch_size=4,8 seq_len=512,1024 "
    "model=small steps=6 warmup_steps=1"
)


class _Photographer(LiveTable):
    """Keeps the last picture in which a trial was in the middle of its steps."""

    def __init__(self, plan: Plan, output: Path, stop: Stop) -> None:
        super().__init__(plan, output, stop)
        self.picture = ""

    def ticked(self, running: Mapping[str, Trial], waiting: int, engine_state: str) -> None:
        super().ticked(running, waiting, engine_state)
        console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
        console.print(Text(f"$ {COMMAND}", style="bold"))
        console.print(self.render())
        if "measure" in console.export_text(clear=False) and waiting > 5:
            self.picture = console.export_svg(title="flopwatch sweep")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="flopwatch-pictures-"))
    sweep = folder / "flopwatch-sweep"
    specs = expand(read_matrix(None, parse_overrides(COMMAND.split()[2:])))
    with held_folder(sweep):
        plan = make_plan(sweep, specs)
        write_trial_list(sweep, plan.trials, "local")
        run_preflight(sweep, specs)
        stop = Stop()
        photographer = _Photographer(plan, Path("flopwatch-sweep"), stop)
        run_plan(plan, LocalEngine(), photographer, stop)
    (PICTURES / "sweep.svg").write_text(photographer.picture)
    draw_report(sweep, folder)
    if len(sys.argv) == 1:
        shutil.rmtree(folder)


def draw_report(sweep: Path, folder: Path) -> None:
    """The first screen of the page, as a browser shows it."""
    page = folder / "report.html"
    subprocess.run([sys.executable, "-m", "flopwatch", "report", str(sweep), "--html", str(page)], check=True)
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1280,1500",
    ]
    subprocess.run([*command, f"--screenshot={PICTURES / 'report.png'}", page.as_uri()], check=True)


if __name__ == "__main__":
    main()
