"""Runs the parts of the campaign, one after the other, and writes docs/campaigns.md: when each last ran, its figures.

    make campaign                                             # all parts; a day
    PYTHONPATH=benchmarks python -m campaign kills-slurm kills-local  # some of them
    PYTHONPATH=benchmarks python -m campaign --page           # only writes the page

The output of each part is kept in .cache/campaign/. A part that fails does not stop the others.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from campaign.parts import PARTS, Part

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.json")
OUTPUTS = ROOT / ".cache" / "campaign"
PAGE = ROOT / "docs" / "campaigns.md"
MOST_LETTERS = 300
HEAD = """\
# Campaigns

What takes too long for CI. `make campaign` runs every part, `make campaign PARTS=NAME` one of them; both write this
page. CI has a short version of most parts among its tests. The figures are the last line that the command printed; the
pages of the topics have the tables.

| part | shows | last run | commit | took | figures |
| --- | --- | --- | --- | --: | --- |
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m campaign", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="NAME", help=", ".join(part.name for part in PARTS))
    parser.add_argument("--page", action="store_true", help="run nothing")
    options = parser.parse_args()
    if unknown := set(options.parts) - {part.name for part in PARTS}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    results = json.loads(RESULTS.read_text("utf-8"))
    failed = 0
    for part in () if options.page else PARTS:
        if not options.parts or part.name in options.parts:
            results[part.name] = run(part)
            failed += results[part.name]["status"] != 0
            RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
    PAGE.write_text(page(results), "utf-8")
    return min(failed, 1)


def run(part: Part) -> dict[str, Any]:
    words = shlex.split(part.command)
    command = [sys.executable, *(["-m", *words] if words[0] == "pytest" else words)]
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    output = OUTPUTS / f"{part.name}.txt"
    print(f"$ {shlex.join(command)} > {output.relative_to(ROOT)}", flush=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("src", "benchmarks", ".", "tests")),
        **({"FLOPWATCH_LONG": "1", "FLOPWATCH_TEST_SHAPES": "50"} if words[0] == "pytest" else {}),
    }
    began = time.monotonic()
    with output.open("wb") as stream:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT, check=False)
    lines = [line.strip() for line in output.read_text("utf-8", "replace").splitlines() if line.strip()]
    figures = lines[-1][:MOST_LETTERS] if lines else "no output"
    print(f"  status {done.returncode}, {time.monotonic() - began:.0f} s: {figures}", flush=True)
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "commit": subprocess.run(
            ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip(),
        "seconds": round(time.monotonic() - began),
        "status": done.returncode,
        "figures": figures,
    }


def page(results: dict[str, Any]) -> str:
    return HEAD + "".join(_row(part, results.get(part.name)) for part in PARTS)


def _row(part: Part, last: dict[str, Any] | None) -> str:
    """A row of the table.

    >>> print(_row(Part("kills", "kills.py", "it holds"), None), end="")
    | kills: `kills.py` | it holds | not since this page exists | | | |
    """
    named = f"| {part.name}: `{part.command}` | {part.shows} |"
    if last is None:
        return f"{named} not since this page exists | | | |\n"
    figures = last["figures"].replace("|", "/") + (f" (status {last['status']})" if last["status"] else "")
    return f"{named} {last['date']} | `{last['commit']}` | {last['seconds'] / 60:.0f} min | {figures} |\n"


if __name__ == "__main__":
    raise SystemExit(main())
