"""How the tests' trials end under each engine: the outcome, and which evidence of it is written.

The tree's own test makes the sweeps, and its folders are read as files. An engine that this machine does not have is
left out.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from house.goldens.tree import Tree

ENGINES = ("local", "ray", "slurm")
ABSENT = ["this machine does not have it"]


def record(tree: Tree, match: str = "") -> dict[str, list[str]]:
    """A case per engine and ending."""
    found: dict[str, list[str]] = {}
    for engine in ENGINES:
        if match.partition("/")[0] in engine or engine in match:
            found |= {name: lines for name, lines in _endings(tree, engine).items() if match in name or name in match}
    return found


def _endings(tree: Tree, engine: str) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory() as made:
        test = f"tests/sweep/test_endings.py::test_under_the_{engine}_engine"
        command = [sys.executable, "-m", "pytest", test, "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
        folder = Path(made) / "tests"
        done = subprocess.run(
            [*command, "--basetemp", str(folder)],
            cwd=tree.root, env=tree.environment(FLOPWATCH_LONG="1"),  # CI leaves two engines to the campaign
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        print(f"{engine}: {done.stdout.strip().splitlines()[-1]}", file=sys.stderr)
        if re.search(r"^1 skipped", done.stdout, re.MULTILINE):
            return {engine: ABSENT}
        results = [json.loads(line) for path in folder.rglob("results.jsonl") for line in path.read_text().splitlines()]
        return {f"{engine}/{result['name'].partition('_')[0]}": _lines(result) for result in results}


def _lines(result: dict[str, Any]) -> list[str]:
    evidence = result.get("evidence") or {}
    values = {name: evidence[name] for name in ("exit_code", "signal", "killed_by") if name in evidence}
    return [
        f"outcome {result['outcome']}, phase {result.get('phase')}",
        f"evidence {' '.join(sorted(evidence))}",
        f"values {json.dumps(values, sort_keys=True)}",
        f"keys {' '.join(sorted(name for name, value in result.items() if value not in (None, '', [], {})))}",
    ]
