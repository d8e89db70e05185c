"""Draw the pictures of README and docs from what `record.py` has recorded, as today's code shows it.

    PYTHONPATH=benchmarks python benchmarks/pages/redraw.py

Screens of terminals become SVG, and chromium photographs the pages. `docs/pictures/shown.json` notes what each picture
shows; a quick test fails once the code would show something else.
"""

import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from flopwatch.cli.trials.sweep_screens import Progress
from flopwatch.records.sweep_results import read_results
from flopwatch.records.trial_files import HEARTBEAT
from flopwatch.sweep.folder import Trial
from flopwatch.sweep.runner.plan import Plan
from pages.record import RECORDED, ROOT, SWEEP

PICTURES = ROOT / "docs" / "pictures"
SHOWN = PICTURES / "shown.json"
WIDTH = 92
SCREENS = {
    "flops": (
        "flops --model examples/llama-7b.json --batch-size 2 --seq-len 4096 --checkpoint "
        '--device "NVIDIA H100 80GB HBM3" --step-time 0.7'
    ),
    "peak": 'peak --name "NVIDIA H100 80GB HBM3"',
    "watch": "watch runs/example --once",
    "explain": "explain runs/example --step 190",
    "why": "why runs/example",
    "sweep": SWEEP,
}
PAGES = {"report": "flopwatch-sweep", "run-page": "runs/example"}
NAMES = (*SCREENS, *PAGES)
_ENDED = 7
"""This many trials have ended in the picture of the live table, and the next one is being measured."""


def shown(name: str) -> str:
    """What a picture shows, by today's code: the text of a terminal with its colours, or the HTML of a page."""
    if name == "sweep":
        return _live_table()
    if name in SCREENS:
        return _printed(SCREENS[name], ROOT if "examples/" in SCREENS[name] else RECORDED)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        _printed(f"report {PAGES[name]} --html {page}", RECORDED)
        return page.read_text(encoding="utf-8")


def digest(text: str) -> str:
    """A hash of what is shown, without the version in the footer of a page."""
    return hashlib.sha256(re.sub("<footer>.*?</footer>", "", text).encode()).hexdigest()[:16]


def _printed(arguments: str, folder: Path) -> str:
    colours = {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLORTERM": "truecolor"}
    command = [sys.executable, "-m", "flopwatch", *shlex.split(arguments)]
    own = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "LINES") and not name.startswith("FLOPWATCH_")
    }
    environment = {**own, **colours, "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    if done.returncode:
        raise SystemExit(f"flopwatch {arguments} ended with status {done.returncode}: {done.stderr}")
    return done.stdout


def _live_table() -> str:
    results = list(read_results(RECORDED / "flopwatch-sweep").values())
    now = [0.0]
    with tempfile.TemporaryDirectory() as folder:
        trials = tuple(Trial(Path(folder), result.name, result.key, result.spec) for result in results)
        console = _console()
        table = Progress(Plan(trials, trials, {}), console.print, clock=lambda: now[0])
        for result in results[:_ENDED]:
            now[0] += result.seconds or 0.0
            table.ended(result)
        running = trials[_ENDED]
        running.folder.mkdir(parents=True)
        (running.folder / HEARTBEAT).write_text('{"phase": "measure", "step": 3}')
        table.started(running)
        now[0] += 0.6 * (results[_ENDED].seconds or 0.0)
        table.ticked({running.name: running}, len(trials) - _ENDED - 1, "1 at a time")
        console.print(table.drawn())
    return console.export_text(styles=True)


def _console() -> Console:
    return Console(
        record=True,
        width=WIDTH,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )


def draw(name: str, text: str) -> list[Path]:
    """Write the pictures of this name."""
    if name in SCREENS:
        console = _console()
        console.print(Text(f"$ flopwatch {SCREENS[name]}", style="bold"))
        console.print(Text.from_ansi(text))
        picture = PICTURES / f"{name}.svg"
        picture.write_text(console.export_svg(title="flopwatch"), encoding="utf-8")
        return [picture]
    if name == "report":
        return [photograph(text, PICTURES / "report.png", 1280, 1900, "light")]
    return [
        photograph(text, PICTURES / f"{name}-{width}-{scheme}.webp", width, 1700, scheme)
        for width in (1280, 390)
        for scheme in ("light", "dark")
    ]


def photograph(html: str, picture: Path, width: int, height: int, scheme: str) -> Path:
    """Photograph a frame of the wanted width, because Chromium's window is never narrower than 500."""
    with tempfile.TemporaryDirectory() as folder:
        page, shot, frame = (Path(folder) / name for name in ("page.html", "shot.png", "frame.html"))
        page.write_text(html, encoding="utf-8")
        style = f"border:0;width:{width}px;height:{height}px;color-scheme:{scheme}"
        frame.write_text(f'<body style="margin:0"><iframe src="{page.as_uri()}" style="{style}"></iframe>')
        dark = ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *dark]
        size = f"--window-size={max(width, 500)},{height}"
        command = ["chromium", *options, f"--user-data-dir={folder}/browser", size, f"--screenshot={shot}"]
        subprocess.run([*command, frame.as_uri()], check=True, stderr=subprocess.DEVNULL)
        with Image.open(shot) as image:
            cropped = image.crop((0, 0, width, height)).convert("RGB")
            cropped.save(picture, quality=80, method=6, optimize=True)
    return picture


def main() -> None:
    found = json.loads(SHOWN.read_text()) if SHOWN.exists() else {}
    for name in NAMES:
        text = shown(name)
        for picture in draw(name, text):
            print(f"{picture}: {picture.stat().st_size:,} bytes")
        found[name] = digest(text)
        SHOWN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
