"""Real folders of sweeps, corrupted at random: does `report` or a resume ever fail, or lose a trial that had finished?

python benchmarks/reliability/folder_corruptions.py --count 200 --seed 0

What was whole is decided here by comparing bytes with the folder before it was corrupted, not by flopwatch.
"""

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flopwatch.cli import main as flopwatch
from reliability.corruptions import corrupt

_COMMANDS = r"""
  - {label: plain, command: "true"}
  - {label: told, command: 'echo "{\"step_seconds\": [0.1, 0.2]}" > {trial_dir}/metrics.json'}
  - {label: fails, command: "echo no shards in [/data]; exit 3"}
  - {label: crashes, command: "kill -SEGV $$"}
"""
_SIZES = "seq_lens: [16]\nsteps: 3\nwarmup_steps: 1\ntrace: false\n"
_PATIENCE_SECONDS = 240
_REWRITTEN = ("sweep.json", "lock", "runner.json", "preflight.json", "preflight_request.json", "preflight.jsonl")
_PASSING = ("logs/", "runners/")


@dataclass(frozen=True)
class Template:
    """A sweep that has run.

    Attributes:
        folder: Where.
        matrix: Its YAML file.
        outcomes: How each trial ended, from its files.
    """

    folder: Path
    matrix: Path
    outcomes: dict[str, str]


@dataclass
class Figures:
    """What was found."""

    corruptions: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    exit_codes: Counter[str] = field(default_factory=Counter)
    whole: int = 0
    damaged: int = 0
    problems: list[str] = field(default_factory=list)


def run_campaign(
    place: Path, count: int, seed: int, *, with_torch: bool, batch_sizes: Sequence[int] = (1, 2)
) -> Figures:
    """Corrupt copies of real folders, and look at each through every door."""
    templates = make_templates(place, f"batch_sizes: {list(batch_sizes)}\n{_SIZES}", with_torch=with_torch)
    figures = Figures()
    for number in range(count):
        chance = random.Random(f"{seed}/{number}")
        few = templates[:-1] if with_torch and chance.random() < 0.9 else templates
        template = chance.choice(few)
        folder = place / "corrupted"
        _remove(folder)
        shutil.copytree(template.folder, folder, symlinks=True)
        kinds = [corrupt(folder, chance) for _ in range(chance.choice((1, 1, 2, 3, 5)))]
        figures.corruptions += 1
        figures.by_kind.update(kind.partition(" ")[0].partition("(")[0] for kind in kinds)
        before = len(figures.problems)
        _look(folder, template, figures)
        for place_in_list in range(before, len(figures.problems)):
            problem = figures.problems[place_in_list]
            figures.problems[place_in_list] = f"#{number} of {template.folder.name} ({'; '.join(kinds)}): {problem}"
            print(figures.problems[place_in_list], flush=True)
    return figures


def _remove(folder: Path) -> None:
    """Also what may not be read."""
    for root, _, _ in os.walk(folder):
        for path in Path(root).iterdir():
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)


def make_templates(place: Path, sizes: str, *, with_torch: bool) -> list[Template]:
    """A finished sweep, one whose runner died before it noted the ends, one that was run again; with torch last."""
    matrix = place / "commands.yaml"
    matrix.write_text(f"trainers:{_COMMANDS}{sizes}")
    finished, orphaned, rerun = (place / name for name in ("finished", "orphaned", "rerun"))
    _call("sweep", str(matrix), "-o", str(finished))
    shutil.copytree(finished, orphaned)
    lines = (orphaned / "results.jsonl").read_text().splitlines(keepends=True)
    (orphaned / "results.jsonl").write_text("".join(lines[::2]))
    shutil.copytree(finished, rerun)
    _call("sweep", str(matrix), "-o", str(rerun), "--only", "failed")
    found = [Template(folder, matrix, _outcomes(folder)) for folder in (finished, orphaned, rerun)]
    if with_torch:
        torch_matrix = place / "torch.yaml"
        torch_matrix.write_text(f"trainers:\n  - standard\nmodels: [tiny]\n{sizes}")
        _call("sweep", str(torch_matrix), "-o", str(place / "torch"))
        found.append(Template(place / "torch", torch_matrix, _outcomes(place / "torch")))
    return found


def _outcomes(folder: Path) -> dict[str, str]:
    """From the trials' own files, which are whole here."""
    files = (folder / "trials").glob("*/result.json")
    found = {file.parent.name: str(json.loads(file.read_text())["outcome"]) for file in files}
    assert len(found) >= 2, found
    return found


def _look(folder: Path, template: Template, figures: Figures) -> None:
    whole = whole_trials(folder, template)
    figures.whole += len(whole)
    figures.damaged += len(template.outcomes) - len(whole)
    tell = figures.problems.append
    before = _files(folder)
    shown = _report(folder, figures)
    for name in whole:
        if shown is not None and shown.get(name) != template.outcomes[name]:
            tell(f"{name} is {template.outcomes[name]} and whole, the report says {shown.get(name)}")
    _step(figures, "dry run", (0, 2), "sweep", str(template.matrix), "-o", str(folder), "--dry-run")
    if _files(folder) != before:
        tell("report or dry run wrote into the folder")
    code, text = _step(figures, "resume", (0, 1, 2), "sweep", str(template.matrix), "-o", str(folder))
    for name in whole:
        if f"{name} ok" in text or f"{name} {template.outcomes[name]}:" in text:
            tell(f"{name} is whole and was run again")
    _nothing_overwritten(folder, before, tell)
    if code == 2:
        return
    after = _report(folder, figures) or {}
    left_alone = _newer(before) | _locked(folder)
    for name, outcome in template.outcomes.items():
        if after.get(name) != outcome and name not in left_alone:
            tell(f"after the resume {name} is {after.get(name)}, not {outcome}")


def whole_trials(folder: Path, template: Template) -> list[str]:
    """Trials whose result stands byte for byte as it was, in the list or in their own folder."""
    list_before = _bytes(template.folder / "results.jsonl").split(b"\n")
    list_now = set(_bytes(folder / "results.jsonl").split(b"\n"))
    newest = {json.loads(line)["name"]: line for line in list_before if line}
    found = []
    for name in template.outcomes:
        own = Path("trials", name, "result.json")
        is_own_whole = _bytes(folder / own) == _bytes(template.folder / own)
        if is_own_whole or newest.get(name) in list_now:
            found.append(name)
    return found


def _bytes(file: Path) -> bytes:
    """Of a regular file; else nothing."""
    try:
        return file.read_bytes() if file.is_file() else b""
    except OSError:
        return b""


def _files(folder: Path) -> dict[str, bytes]:
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root, name)
            found[str(path.relative_to(folder))] = _bytes(path)
    return found


def _newer(files: dict[str, bytes]) -> set[str]:
    """Names of trials of which a newer format stands anywhere."""
    found = set()
    for path, content in files.items():
        if path.startswith("trials/") or path == "results.jsonl":
            for line in content.split(b"\n") if path == "results.jsonl" else [content]:
                with contextlib.suppress(ValueError, RecursionError, AttributeError, TypeError):
                    record = json.loads(line)
                    if record.get("format", 0) > 1:
                        found.add(record.get("name") if path == "results.jsonl" else Path(path).parts[1])
    return found


def _locked(folder: Path) -> set[str]:
    """Trials whose folder may not be read; root may."""
    return {place.name for place in (folder / "trials").iterdir() if not os.access(place, os.R_OK | os.X_OK)}


def _nothing_overwritten(folder: Path, before: dict[str, bytes], tell: object) -> None:
    """Every file's content is still there, in its place or moved aside; the list of results only grew."""
    assert callable(tell)
    after = _files(folder)
    contents = set(after.values())
    for path, content in before.items():
        if path in _REWRITTEN or path.startswith(_PASSING) or not content:
            continue
        if path == "results.jsonl" and after.get(path, b"").startswith(content.rstrip(b"\n")):
            continue
        if content not in contents:
            tell(f"{path} was overwritten")


def _report(folder: Path, figures: Figures) -> dict[str, str] | None:
    page = folder.parent / "page"
    for words in ((), ("--html", str(page)), ("--md", str(page)), ("--csv", str(page))):
        _step(figures, "report", (0, 2), "report", str(folder), *words)
    code, text = _step(figures, "report --json", (0, 2), "report", str(folder), "--json")
    if code != 0:
        return None
    try:
        return {trial["name"]: trial["outcome"] for trial in json.loads(text)["trials"]}
    except (ValueError, KeyError) as error:
        figures.problems.append(f"report --json printed no JSON: {error!r}: {text[:200]}")
        return None


def _step(figures: Figures, what: str, allowed: Sequence[int], *words: str) -> tuple[int, str]:
    code, text = _call(*words)
    figures.exit_codes[f"{what}: {code}"] += 1
    if code not in allowed or "Traceback" in text:
        figures.problems.append(f"{what} ended with {code}: {text[-1500:]}")
    return code, text


def _call(*words: str) -> tuple[int, str]:
    """The command line, in this process: its exit status and what it printed, 99 for an exception."""
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors), _impatient():
        try:
            flopwatch(words)
            code = 0
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
        except BaseException:
            return 99, traceback.format_exc()
    # JSON goes to the output alone.
    return code, printed.getvalue() if "--json" in words else printed.getvalue() + errors.getvalue()


@contextlib.contextmanager
def _impatient() -> Iterator[None]:
    """A command that waits for ever, for a FIFO say, is a failure."""

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError(f"not done after {_PATIENCE_SECONDS} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_PATIENCE_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-torch", action="store_true", help="commands only")
    asked = parser.parse_args()
    began = time.monotonic()
    os.environ.setdefault("FLOPWATCH_VISIBLE_SECONDS", "2")  # how long a runner with damaged files is watched for life
    with tempfile.TemporaryDirectory(prefix="folder-corruptions-") as place:
        os.environ.setdefault("FLOPWATCH_SLOT_DIR", f"{place}/slots")
        figures = run_campaign(Path(place), asked.count, asked.seed, with_torch=not asked.no_torch)
    print(f"{figures.corruptions} corrupted folders in {time.monotonic() - began:.0f} s, seed {asked.seed}")
    print(f"  kinds: {', '.join(f'{kind} {number}' for kind, number in sorted(figures.by_kind.items()))}")
    print(f"  exit codes: {', '.join(f'{kind} x {number}' for kind, number in sorted(figures.exit_codes.items()))}")
    print(f"  {figures.whole} finished trials were whole somewhere, {figures.damaged} nowhere")
    print(f"  {len(figures.problems)} problems: tracebacks, lost or rerun whole trials, overwritten files")
    raise SystemExit(bool(figures.problems))


if __name__ == "__main__":
    main()
