"""Every text form of runs and sweeps, of the help and of common mistakes, as one source tree prints them."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from house.goldens.forms import digests, kept
from house.goldens.inputs import unpack
from house.goldens.tree import Tree

LARGE_TRIALS = 10_000
_COMMANDS = [
    "run", "watch", "why", "trace", "explain", "compare", "flops", "peak", "sweep", "trial", "fit", "report", "init",
    "doctor",
]  # fmt: skip
_RUNS_COMPARED = [
    ("ended", "slower"), ("slower", "ended"), ("ended", "ended"), ("by_hand", "doubted"), ("ended", "no_peak"),
    ("real_plain", "real_evaluation"), ("waiting", "estimated"), ("resumed", "long"), ("hostile", "by_hand"),
]  # fmt: skip
_MISTAKES = {
    "no folder": ["report", "nowhere"],
    "empty folder": ["why", "sweeps/3/logs"],
    "a sweep is no run": ["why", "sweeps/3"],
    "a run and a sweep": ["compare", "runs/ended", "sweeps/3"],
    "no such step": ["explain", "runs/ended", "--step", "99999"],
    "no such metric": ["report", "sweeps/240", "--metric", "temperature"],
    "no such command": ["raport"],
    "no such option": ["report", "sweeps/240", "--htlm", "x"],
    "a word for a number": ["explain", "runs/ended", "--step", "many"],
    "several runs": ["why", "runs"],
    "no such device": ["peak", "--name", "Abacus 9000"],
}
_OTHERS = {
    "peak H100": ["peak", "--name", "H100"],
    "peak H100 json": ["peak", "--name", "H100", "--json"],
    "list of runs": ["watch", "runs", "--list"],
    "gate": ["compare", "runs/ended", "runs/slower", "--fail-if-slower", "0.1"],
    "sweep by MFU": ["report", "sweeps/240", "--metric", "mfu,hfu"],
    "a trace": ["trace", "runs/traced/traces/step9_rank0.pt.trace.json.gz"],
    "traces of a run": ["trace", "runs/traced"],
}


def record(tree: Tree, match: str = "") -> dict[str, list[str]]:
    """The lines of each case whose name has these words in it."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        unpack(folder)
        cases = [case for case in _cases(folder) if match in case["name"]]
        return {name: _lines(case, answer) for name, case, answer in _told(tree, folder, cases)}


def record_large(tree: Tree, match: str = "") -> dict[str, list[str]]:
    """Digests of the forms of a sweep with 10,000 trials, which the tree's own testbed writes."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        maker = [sys.executable, str(tree.root / "testbeds" / "made_up_sweep.py"), "large", str(LARGE_TRIALS)]
        subprocess.run(maker, check=True, cwd=folder, env=tree.environment(), stdout=subprocess.DEVNULL)
        cases = [case for case in _forms_of("large", "large", wide=False) if match in case["name"]]
        lines = {
            name: [_ending(answer), *digests(case["form"], answer["out"])]
            for name, case, answer in _told(tree, folder, cases)
        }
        written = "".join((folder / "large" / name).read_text("utf-8") for name in ("results.jsonl", "sweep.json"))
        return {"large/as written": digests("text", written), **lines}


def _cases(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((folder / "sweeps").iterdir()):
        yield from _forms_of(f"sweeps/{path.name}", f"sweeps/{path.name}")
    for path in sorted((folder / "runs").iterdir()):
        run = f"runs/{path.name}"
        yield from _forms_of(run, run)
        for command in ("why", "explain"):
            yield _case(f"{run}/{command}", "text", command, run)
            yield _case(f"{run}/{command} json", "json", command, run, "--json")
        yield _case(f"{run}/why wide", "text", "why", run, columns=140)
        yield _case(f"{run}/why with a peak", "text", "why", run, "--peak-tflops", "1979")
        yield _case(f"{run}/watch", "text", "watch", run, "--once")
        yield _case(f"{run}/notebook", "html", "notebook", run)
    for one, other in _RUNS_COMPARED:
        name, places = f"compare/runs {one} {other}", (f"runs/{one}", f"runs/{other}")
        yield _case(name, "text", "compare", *places)
        yield _case(f"{name} json", "json", "compare", *places, "--json")
    yield _case("help/flopwatch", "text", "--help", columns=80)
    yield from (_case(f"help/{command}", "text", command, "--help", columns=80) for command in _COMMANDS)
    for group, all_words in (("mistakes", _MISTAKES), ("others", _OTHERS)):
        for name, words in all_words.items():
            yield _case(f"{group}/{name}", "json" if "--json" in words else "text", *words)


def _forms_of(name: str, folder: str, *, wide: bool = True) -> Iterator[dict[str, Any]]:
    yield _case(f"{name}/report", "text", "report", folder, columns=80)
    if wide:
        yield _case(f"{name}/report wide", "text", "report", folder, columns=140)
    yield _case(f"{name}/report md", "text", "report", folder, "--md", "-")
    yield _case(f"{name}/report html", "html", "report", folder, "--html", "-")
    yield _case(f"{name}/report json", "json", "report", folder, "--json")
    yield _case(f"{name}/report csv", "csv", "report", folder, "--csv", "-")


def _case(name: str, form: str, *arguments: str, columns: int = 100) -> dict[str, Any]:
    return {"name": name, "form": form, "arguments": arguments, "columns": columns}


def _told(
    tree: Tree, folder: Path, cases: list[dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    asked, answers = folder / "asked.json", folder / "answers.json"
    asked.write_text(json.dumps(cases))
    tree.run("house.goldens.teller", str(asked), str(answers), cwd=folder)
    told = json.loads(answers.read_text())
    yield from ((case["name"], case, told[case["name"]]) for case in cases)


def _lines(case: dict[str, Any], answer: dict[str, Any]) -> list[str]:
    errors = [f"stderr: {line}" for line in answer["err"].splitlines()]
    if any("Traceback (most" in line for line in errors):
        errors = errors[-1:]  # the lines above name the checkout
    return [_ending(answer), *kept(case["form"], answer["out"]), *errors]


def _ending(answer: dict[str, Any]) -> str:
    return f"exit {answer['exit']}"
