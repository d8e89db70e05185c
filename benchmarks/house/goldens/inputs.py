"""The folders that the texts are made of: made-up sweeps, made-up runs, and logs that real trainings wrote.

    python -m house.goldens.inputs REAL_RUNS    # writes data/inputs.tar.xz

They are kept as files, because what is compared is what one commit and another say about the same bytes. `REAL_RUNS`
has one folder per training of `testbeds/unchanged`, as `flopwatch run --output-dir` wrote it; their process and host
are removed, so that no machine takes them for its own.
"""

import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from testbeds.long_run_log import write_long_run

ROOT = Path(__file__).parents[3]
ARCHIVE = Path(__file__).parent / "data" / "inputs.tar.xz"
MODIFIED_UNIX_TIME = 1_790_000_000
LONG_STEPS = 20_000
LOG = "training_log.jsonl"
_SECONDS = {
    "wall": 1630.0, "start_up": 10.0, "restart": 30.0, "eval": 15.0, "checkpoint": 4.5, "pause": 0.3, "count": 0.2,
    "train": 1570.0, "input_wait": 608.0, "divided": 960.0, "optimizer": 40.0, "host": 2.0, "model_at_peak": 500.0,
    "hardware_at_peak": 500.0,
}  # fmt: skip


def unpack(folder: Path) -> None:
    """Put the inputs into a folder; the long run is made here, because its maker uses nothing of flopwatch."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    log = write_long_run(folder / "runs" / "long", LONG_STEPS)
    os.utime(log, (MODIFIED_UNIX_TIME, MODIFIED_UNIX_TIME))


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        _write_sweeps(folder / "sweeps")
        _write_runs(folder / "runs", import_module("support.make_run_log"))
        _write_other_runs(folder / "runs", import_module("support.hand_made_run"))
        for source in sorted(path.parent for path in Path(sys.argv[1]).glob(f"*/{LOG}")):
            _copy_without_host(source / LOG, folder / "runs" / f"real_{source.name}")
        _pack(folder)
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size:,} bytes")


def _write_sweeps(folder: Path) -> None:
    made_up = import_module("testbeds.made_up_sweep")
    specs = made_up.example_specs()
    for count in (3, 240):
        made_up.write_sweep(folder / str(count), [made_up.make_result(spec) for spec in specs[:count]], specs[:count])
    half = [made_up.make_result(spec) for spec in specs[:200]]
    made_up.write_sweep(folder / "slower", [_slowed(result, 1.0 + index / 400) for index, result in enumerate(half)])
    made_up.write_sweep(folder / "unfinished", half[:100], specs)
    made_up.write_sweep(folder / "hostile", import_module("support.hostile_sweep").hostile_results())
    shutil.copytree(ROOT / "benchmarks" / "pages" / "recorded" / "flopwatch-sweep", folder / "recorded")


def _slowed(result: Any, factor: float) -> Any:
    if result.measured is None or result.measured.steps is None:
        return result
    steps = result.measured.steps
    steps = replace(steps, median=steps.median * factor, low=steps.low * factor, high=steps.high * factor)
    environment = {**result.environment, "torch": "2.14.0"}
    return replace(result, measured=replace(result.measured, steps=steps), environment=environment)


def _write_runs(folder: Path, maker: Any) -> None:
    """Runs of a made-up language model: ended, running, resumed, traced, damaged, and with less and less known."""
    story = maker.Story
    maker.write_run(folder / "ended", 600, story(total_steps=600), ended=True)
    maker.write_run(folder / "running", 700)
    maker.write_run(folder / "slower", 600, story(total_steps=600, seed=1, eval_every=100), ended=True)
    maker.write_run(folder / "no_peak", 300, story(knows_peak=False), ended=True)
    nothing = story(knows_peak=False, knows_tokens=False, knows_flops=False, total_steps=None)
    maker.write_run(folder / "nothing_known", 120, nothing)
    maker.write_run(folder / "just_started", 0)
    accounts = maker.Accounts()
    log = maker.write_run(folder / "resumed", 0)
    maker.write_log(log, maker.session(story(), 1, 200, accounts))
    maker.write_log(log, maker.session(story(), 151, 400, accounts, resumed_after_step=150), append=True)
    maker.write_log(log, [replace(maker.summary_of(accounts, 400), ended_by="KeyboardInterrupt")], append=True)
    _damage(maker.write_run(folder / "damaged", 200, ended=True))
    ledgers = import_module("support.ledgers")
    ledgers.write_ledger(folder / "waiting", _SECONDS, tokens=1000, real_tokens=700, notes=("a lower bound",))
    more = {"exact": False, "notes": ("model FLOPs include padding",), "device": "cpu", "peak": ledgers.CPU}
    ledgers.write_ledger(folder / "estimated", {**_SECONDS, "recompute_at_peak": 100.0}, **more)
    ledgers.write_ledger(folder / "traced", _SECONDS, achievable=700e12)
    traces = import_module("support.make_trace")
    (folder / "traced" / "traces").mkdir()
    for rank in (0, 1):
        path = folder / "traced" / "traces" / f"step9_rank{rank}.pt.trace.json.gz"
        traces.write_trace(path, traces.steps_on_device(2 + rank), distributedInfo={"rank": rank})


def _damage(path: Path) -> None:
    """A line of another program, a record of the wrong type, a torn line in the middle and one at the end."""
    lines = path.read_text("utf-8").splitlines()
    lines[6] = lines[6][: len(lines[6]) // 2]
    lines.insert(5, "printed by something else")
    lines.insert(9, json.dumps({"type": "row", "step": "x", "values": []}))
    path.write_text("\n".join(lines)[:-40], "utf-8")


def _write_other_runs(folder: Path, by_hand: Any) -> None:
    by_hand.write_run(folder / "by_hand")
    lines = by_hand.records()
    lines[8] |= {"exact": False}
    doubt = {"step": 7, "level": "warning", "code": "rows_in_doubt", "message": "a later count differs"}
    lines.insert(9, {"type": "notice", **doubt, "doubted": [[5, 5]]})
    by_hand.write_run(folder / "doubted", lines)
    hostile = import_module("support.hostile_sweep").HOSTILE
    by_hand.write_run(folder / "hostile", list(_hostile_lines(by_hand, hostile)))
    for name in ("example", "ranks"):
        source = ROOT / "benchmarks" / "pages" / "recorded" / "runs" / name / LOG
        _copy_without_host(source, folder / f"recorded_{name}")


def _hostile_lines(by_hand: Any, text: str) -> Iterator[dict[str, Any]]:
    values = {f"training/{text}": 1.0, text: 2.0, "ranks/longest_input_wait_rank": 1}
    yield by_hand.start("one", 0.0, output_dir=text, config={text: text}, environment={"host": text, text: text})
    yield by_hand.provenance(1, notes=[text], method=text, attention=text)
    yield by_hand.row([1], [1.0], [1.0], 1.0, {"train": 1.0, "wall": 2.0, text: 1.0}, values=values, notes=[text])
    yield {"type": "notice", "step": 1, "level": text, "code": text, "message": text}
    yield {"type": "summary", "step": 2, "unix_time": 4.0, "ended_by": f"Error: {text}", "exact": False}


def _copy_without_host(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    with (folder / LOG).open("w", encoding="utf-8") as log:
        for line in source.read_text("utf-8").splitlines():
            record = json.loads(line)
            if record["type"] == "run":
                record.pop("process", None)
                record["environment"] |= {"host": "elsewhere"}
            log.write(json.dumps(record) + "\n")


def _pack(folder: Path) -> None:
    ARCHIVE.parent.mkdir(exist_ok=True)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for number, path in enumerate(paths):
            data = path.read_bytes()
            about = tarfile.TarInfo(str(path.relative_to(folder)))
            # Runs of a folder are ordered by the times of their files.
            about.size, about.mtime = len(data), MODIFIED_UNIX_TIME + 60 * number
            archive.addfile(about, io.BytesIO(data))


if __name__ == "__main__":
    main()
