"""Writes the log of a training that never ran, with numbers that add up.

A language model of 1.3 billion parameters on one H100: padded batches, activation checkpointing, evaluation,
checkpoints and a pause. Every value of a row is computed from the steps' columns by its definition in
`flopwatch.records.metrics`.

    python tests/support/make_run_log.py RUN_DIR [STEPS]            a finished log
    python tests/support/make_run_log.py RUN_DIR [STEPS] --live     ten windows a second, for `flopwatch watch`
"""

import json
import math
import random
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flopwatch.records.metrics import find_metric
from flopwatch.records.run import Notice, Provenance, Record, Row, RunStart, Summary

PEAK = {
    "flops_per_s": 989.4e12,
    "device": "H100 SXM5 80GB",
    "dtype": "bf16",
    "source": "NVIDIA H100 datasheet",
    "kind": "datasheet",
    "confidence": "high",
    "fraction": 1.0,
}
LAW = {
    "forward": {"samples": "0", "positions": "2617245696", "pairs": "196608", "step": "0"},
    "backward": {"samples": "0", "positions": "5234491392", "pairs": "393216", "step": "0"},
    "recompute": {"samples": "0", "positions": "872415232", "pairs": "65536", "step": "0"},
}
START_UNIX_TIME = 1_790_000_000.0
SAMPLES = 8


@dataclass
class Story:
    """What is known in this run, and how often things happen."""

    seed: int = 0
    total_steps: int | None = 20_000
    log_every: int = 10
    detailed_every: int = 50
    eval_every: int = 500
    checkpoint_every: int = 1000
    knows_peak: bool = True
    knows_tokens: bool = True
    knows_flops: bool = True
    pads: bool = True
    device_count: int = 1


@dataclass
class Accounts:
    """What has added up since the first start."""

    unix_time: float = START_UNIX_TIME
    totals: dict[str, float] = field(default_factory=dict)
    step_seconds: list[float] = field(default_factory=list)

    def add(self, key: str, amount: float) -> None:
        self.totals[key] = self.totals.get(key, 0) + amount


def law_flops(phase: str, lengths: Iterable[int]) -> int:
    terms = LAW[phase]
    return sum(int(terms["positions"]) * length + int(terms["pairs"]) * length**2 for length in lengths)


def lengths_of(number: int, story: Story) -> list[int]:
    """The real lengths of a step's samples; the log does not hold them."""
    chance = random.Random(f"lengths {story.seed} {number}")
    return [chance.randint(1400, 2048) if story.pads else 2048 for _ in range(SAMPLES)]


def make_step(number: int, since_start: int, story: Story) -> dict[str, object]:
    """The cells of one step; `since_start` counts the session's steps from 0."""
    chance = random.Random(f"{story.seed} {number}")
    lengths = lengths_of(number, story)
    padded = [max(lengths)] * SAMPLES
    hardware = sum(law_flops(phase, padded) for phase in LAW)
    wait = 0.002 + chance.expovariate(1 / 0.006)
    efficiency = 0.52 + chance.gauss(0, 0.012) - 0.05 * (number % 4000 > 3600)
    seconds = hardware / (PEAK["flops_per_s"] * efficiency) + wait
    cells: dict[str, object] = {
        "step": number,
        "seconds": None if since_start == 0 else seconds * (12 if since_start < 3 else 1),
        "samples": SAMPLES,
        "input_wait_seconds": wait,
        "warm_up": 0 < since_start < 3,
        "loss": 1.9 + 9.1 * (1 + number / 40) ** -0.62 + chance.gauss(0, 0.05),
    }
    if story.knows_tokens:
        cells |= {"tokens": sum(padded), "real_tokens": sum(lengths), "trainable_tokens": sum(lengths) - 31 * SAMPLES}
    if story.knows_flops:
        cells |= {
            "model_flops": law_flops("forward", lengths) + law_flops("backward", lengths),
            "hardware_flops": hardware,
            "recompute_flops": law_flops("recompute", padded),
        }
    return cells


def row_of(steps: list[dict[str, object]], accounts: Accounts, story: Story) -> Row:
    last = steps[-1]["step"]
    detailed = last % story.detailed_every == 0
    columns = {name: [step[name] for step in steps] for name in steps[0] if name != "recompute_flops"}
    values = {"training/loss": _mean(columns["loss"]), "training/lr": 3e-4, "training/epoch": last / 10_000}
    values |= _rates(steps, story)
    values["total/tokens"] = accounts.totals.get("total/tokens")
    values |= _shares(steps)
    if detailed:
        values |= accounts.totals | _percentiles(accounts.step_seconds[-512:])
    else:
        values = {key: value for key, value in values.items() if find_metric(key).basic}
    known = {key: value for key, value in values.items() if value is not None}
    return Row(last, accounts.unix_time, known, detailed, columns)


def _rates(steps: list[dict[str, object]], story: Story) -> dict[str, float]:
    timed = [step for step in steps if step["seconds"] is not None and not step["warm_up"]]
    seconds = sum(step["seconds"] for step in timed)
    if not timed:
        return {}
    values = {
        "perf/step_time": seconds / len(timed),
        "perf/steps_per_second": len(timed) / seconds,
        "perf/samples_per_second": sum(step["samples"] for step in timed) / seconds,
        "perf/input_wait_percent": 100 * sum(step["input_wait_seconds"] for step in timed) / seconds,
    }
    for name in ("tokens", "real_tokens", "trainable_tokens"):
        if story.knows_tokens:
            values[f"perf/{name}_per_second"] = sum(step[name] for step in timed) / seconds
    for name, share in (("model", "mfu"), ("hardware", "hfu")):
        if story.knows_flops:
            rate = sum(step[f"{name}_flops"] for step in timed) / seconds / story.device_count
            values[f"perf/{name}_flops_per_second_per_device"] = rate
            if story.knows_peak:
                values[f"perf/{share}"] = rate / PEAK["flops_per_s"]
                values[f"perf/{share}_percent"] = 100 * rate / PEAK["flops_per_s"]
    return values


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"perf/step_time_p{percent}": float(np.percentile(ordered, percent)) for percent in (50, 90, 99) if ordered}


def _shares(steps: list[dict[str, object]]) -> dict[str, float]:
    shares = {}
    if "tokens" in steps[0]:
        tokens = sum(step["tokens"] for step in steps)
        shares["perf/padding_percent"] = 100 * (tokens - sum(step["real_tokens"] for step in steps)) / tokens
    if "hardware_flops" in steps[0]:
        again, executed = (sum(step[name] for step in steps) for name in ("recompute_flops", "hardware_flops"))
        shares["perf/recompute_percent"] = 100 * again / executed
    return shares


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def start_of(story: Story, accounts: Accounts, resumed_after_step: int | None) -> RunStart:
    return RunStart(
        session=f"session-{resumed_after_step}",
        unix_time=accounts.unix_time,
        output_dir="runs/llama-1b",
        resumed_after_step=resumed_after_step,
        total_steps=story.total_steps,
        config={"mode": "smart"},
        environment={"host": "node-17", "device": "NVIDIA H100 80GB HBM3"},
    )


def provenance_of(story: Story, step: int) -> Provenance:
    return Provenance(
        step=step,
        mode="smart",
        method="trace" if story.knows_flops else None,
        exact=story.knows_flops,
        attention="full",
        coverage=1.0 if story.knows_flops else None,
        peak=PEAK if story.knows_peak else None,
        device_count=story.device_count,
    )


def session(
    story: Story, first: int, last: int, accounts: Accounts, resumed_after_step: int | None = None
) -> Iterator[Record]:
    """Start, provenance and rows; no summary, as if it were still running."""
    yield start_of(story, accounts, resumed_after_step)
    yield provenance_of(story, first)
    accounts.add("time/count_seconds", 1.4)
    accounts.unix_time += 6.0
    window: list[dict[str, object]] = []
    for number in range(first, last + 1):
        step = make_step(number, number - first, story)
        window.append(step)
        _spend_gap(step, accounts)
        if number % story.log_every == 0 or number == last:
            yield row_of(window, accounts, story)
            window = []
        _interrupt(number, accounts, story)
    if not story.knows_peak:
        yield Notice(first, "warning", "peak_unknown", "The peak of this device is not known; pass peak_flops_per_s=.")


def _spend_gap(step: dict[str, object], accounts: Accounts) -> None:
    accounts.add("total/steps", 1)
    for name in ("samples", "tokens", "real_tokens", "trainable_tokens", "model_flops", "hardware_flops"):
        if name in step:
            accounts.add(f"total/{name}", step[name])
    if step["seconds"] is None:
        return
    accounts.unix_time += step["seconds"]
    accounts.add("time/train_seconds", step["seconds"])
    accounts.add("time/input_wait_seconds", step["input_wait_seconds"])
    if step["warm_up"]:
        accounts.add("time/warm_up_seconds", step["seconds"])
    else:
        accounts.step_seconds.append(step["seconds"])


def _interrupt(number: int, accounts: Accounts, story: Story) -> None:
    interruptions = (
        ("eval", story.eval_every, 14.0),
        ("checkpoint", story.checkpoint_every, 9.0),
        ("pause", 5000, 30.0),
    )
    for phase, every, seconds in interruptions:
        if number % every == 0:
            accounts.add(f"time/{phase}_seconds", seconds)
            accounts.unix_time += seconds


def summary_of(accounts: Accounts, last: int) -> Summary:
    return Summary(last, accounts.unix_time, accounts.totals)


def to_line(record: Record) -> bytes:
    return json.dumps(_finite(record.to_json()), allow_nan=False).encode() + b"\n"


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def write_log(path: Path, records: Iterable[Record], *, append: bool = False) -> Path:
    with path.open("ab" if append else "wb") as file:
        file.writelines(map(to_line, records))
    return path


def write_run(folder: Path, steps: int, story: Story | None = None, *, ended: bool = False) -> Path:
    """A run of one session in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    accounts = Accounts()
    path = write_log(folder / "training_log.jsonl", session(story or Story(), 1, steps, accounts))
    return write_log(path, [summary_of(accounts, steps)], append=True) if ended else path


def main() -> None:
    folder, steps = Path(sys.argv[1]), next((int(word) for word in sys.argv[2:] if word.isdigit()), 12_400)
    if "--live" not in sys.argv:
        write_run(folder, steps)
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "training_log.jsonl").open("wb", buffering=0) as file:
        for record in session(Story(total_steps=steps), 1, steps, Accounts(unix_time=time.time())):
            file.write(to_line(record))
            time.sleep(0.1)


if __name__ == "__main__":
    main()
