"""Make the pictures of terminal screens in README and docs: run the command, draw what it printed.

python benchmarks/pages/screens.py
"""

import io
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
WIDTH = 92
SCREENS = {
    "flops": (
        "flops --model examples/llama-7b.json --batch-size 2 --seq-len 4096 --checkpoint "
        '--device "NVIDIA H100 80GB HBM3" --step-time 0.7'
    ),
    "peak": 'peak --name "NVIDIA H100 80GB HBM3"',
    "watch": "watch runs/example --once",
    "explain": "explain runs/example --step 90",
    "why": "why runs/longer",
    "ranks": "watch runs/ranks --once",
}
EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        train_example(Path(folder))
        for name, arguments in SCREENS.items():
            path = PICTURES / f"{name}.svg"
            path.write_text(drawn(arguments, Path(folder)))
            print(path)


def train_example(folder: Path) -> None:
    """A real run for the commands that look at one."""
    subprocess.run([sys.executable, str(EXAMPLE), "--steps", "120", "--model", "small"], cwd=folder, check=True)
    # A verdict needs a minute of steps.
    longer = ["--steps", "3000", "--folder", "runs/longer", "--sinks", ""]
    subprocess.run([sys.executable, str(EXAMPLE), *longer], cwd=folder, check=True)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    slow = [str(EXAMPLE.with_name("train_ranks.py")), "--slow-rank", "2"]
    subprocess.run([*ranks, *slow], cwd=folder, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def drawn(arguments: str, folder: Path) -> str:
    """An SVG of a terminal in which the command was run."""
    if not (folder / "examples").exists():  # the commands name files as a reader has them
        (folder / "examples").symlink_to(EXAMPLE.parent)
    settings = {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "-m", "flopwatch", *shlex.split(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        env={**os.environ, **settings},
        cwd=folder,
    )
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ flopwatch {arguments}", style="bold"), soft_wrap=False)
    console.print(Text.from_ansi(done.stdout))
    return console.export_svg(title="flopwatch")


if __name__ == "__main__":
    main()
