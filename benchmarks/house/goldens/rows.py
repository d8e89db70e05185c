"""What the logs of all loops and of all unchanged scripts of the testbeds say."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from house.goldens.forms import leaves
from house.goldens.tree import Tree

_LIST_SCRIPTS = """
import json
from testbeds.unchanged.scripts import SCRIPTS
print(json.dumps([[script.path, script.ranks] for script in SCRIPTS]))
"""
_TIMES = re.compile(r"^(step|warm_up)$|seconds$")
_LONGEST_SECONDS = 600


def record(tree: Tree, match: str = "") -> dict[str, list[str]]:
    """The lines of each loop and script whose name has these words in it."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        loops = folder / "loops.json"
        tree.run("house.goldens.loop_rows", str(loops), match, cwd=folder)
        found = {f"loops/{name}": lines for name, lines in json.loads(loops.read_text()).items()}
        command = [sys.executable, "-c", _LIST_SCRIPTS]
        listed = subprocess.run(command, check=True, env=tree.environment(), stdout=subprocess.PIPE).stdout
        for path, ranks in json.loads(listed):
            if match in f"unchanged/{path}":
                found[f"unchanged/{path}"] = _script_lines(tree, path, ranks, folder / path.replace("/", "_"))
        return found


def _script_lines(tree: Tree, path: str, ranks: int, folder: Path) -> list[str]:
    """An unchanged script has no fake clock, so only what does not depend on time is kept."""
    folder.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    script = str(tree.root / "testbeds" / "unchanged" / path)
    command = ["-m", "flopwatch", "run", "--output-dir", str(folder / "log"), script, str(folder / "own")]
    done = subprocess.run(
        [sys.executable, *torchrun, *command],
        env=tree.environment(),
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_LONGEST_SECONDS,
    )
    log = folder / "log" / "training_log.jsonl"
    records = [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
    return [f"exit {done.returncode}", *(line for record in records for line in _without_times(record))]


def _without_times(record: dict[str, Any]) -> Iterator[str]:
    if record["type"] == "notice":
        yield f"notice {record['code']}"
    if record["type"] != "row":
        return
    steps = record["steps"]
    for index, number in enumerate(steps["step"]):
        kept = {name: column[index] for name, column in steps.items() if not _TIMES.search(name) and name != "loss"}
        yield f"step {number}: " + ", ".join(leaves(kept))
    yield f"row {record['step']}: exact = {record.get('exact')}, tokens = {record['values'].get('total/tokens')}"
