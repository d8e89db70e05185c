"""Write the log of a training of ten days that never ran: a million steps in twenty thousand logging windows.

    python testbeds/long_run_log.py RUN_DIR [STEPS]

It has evaluations, checkpoints, three restarts, notices, spikes of the step time, and a ledger that adds up. With
`make_run_log.py` of the tests a million steps would take minutes.
"""

import json
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WINDOW_STEPS = 50
EVAL_EVERY_STEPS, EVAL_SECONDS = 5_000, 45.0
CHECKPOINT_EVERY_STEPS, CHECKPOINT_SECONDS = 10_000, 20.0
STEP_SECONDS, WAIT_SECONDS, OPTIMIZER_SECONDS, HOST_SECONDS = 0.82, 0.02, 0.03, 0.01
START_UNIX_TIME = 1_790_000_000.0
TOKENS = 16_384
MODEL_FLOPS, HARDWARE_FLOPS, RECOMPUTE_FLOPS = 330 * 10**12, 420 * 10**12, 80 * 10**12
PEAK_FLOPS_PER_S = 989.4e12
_PARTS_OF_STEPS = {
    "input_wait": WAIT_SECONDS,
    "divided": STEP_SECONDS,
    "optimizer": OPTIMIZER_SECONDS,
    "host": HOST_SECONDS,
    "model_at_peak": MODEL_FLOPS / PEAK_FLOPS_PER_S,
    "hardware_at_peak": HARDWARE_FLOPS / PEAK_FLOPS_PER_S,
    "recompute_at_peak": RECOMPUTE_FLOPS / PEAK_FLOPS_PER_S,
}
"""Seconds of a step by part: times that lie inside of `train`, and what its FLOPs take at the peak."""


def main() -> None:
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    path = write_long_run(Path(sys.argv[1]), steps)
    print(f"{path}: {path.stat().st_size / 1e6:.0f} MB, {steps:,} steps")


def write_long_run(folder: Path, steps: int = 1_000_000, sessions: int = 4) -> Path:
    """Write the log into `folder`; the training stops and resumes `sessions - 1` times, 30 steps back each time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "training_log.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps(record, separators=(", ", ": ")) + "\n" for record in _records(steps, sessions))
    return path


def _records(steps: int, sessions: int) -> Iterator[dict[str, Any]]:
    clock = {"unix_time": START_UNIX_TIME}
    seconds = dict.fromkeys(("start_up", "train", "eval", "checkpoint", "restart", *_PARTS_OF_STEPS), 0.0)
    share = steps // sessions // WINDOW_STEPS * WINDOW_STEPS
    for session in range(sessions):
        first, last = session * share + 1, (session + 1) * share if session < sessions - 1 else steps
        yield from _session(session, first, last, clock, seconds)
        seconds["restart"] += 300.0
        clock["unix_time"] += 300.0
    yield {"type": "summary", "step": steps, "unix_time": clock["unix_time"] - 300.0, "values": {}, "exact": True}


def _session(
    session: int, first: int, last: int, clock: dict[str, float], seconds: dict[str, float]
) -> Iterator[dict[str, Any]]:
    yield {
        "type": "run",
        "session": f"session-{session}",
        "unix_time": clock["unix_time"],
        "output_dir": "runs/ten-days",
        "resumed_after_step": first - 1 if session else None,
        "total_steps": None,
        "world_size": 8,
        "config": {"mode": "smart", "log_every": WINDOW_STEPS},
        "environment": {"flopwatch": "0.1.0", "torch": "2.13.0", "host": "node-17", "device": "NVIDIA H100 80GB HBM3"},
        "format": 1,
    }
    yield _provenance(first)
    seconds["start_up"] += 60.0
    clock["unix_time"] += 60.0
    for begin in range(first, last + 1, WINDOW_STEPS):
        end = min(begin + WINDOW_STEPS - 1, last)
        yield _row(list(range(begin, end + 1)), clock, seconds)
        if end % 100_000 == 0:
            message = f"The step time of step {end} was five times the median."
            yield {"type": "notice", "step": end, "level": "warning", "code": "slow_step", "message": message}


def _provenance(step: int) -> dict[str, Any]:
    peak = {"flops_per_s": PEAK_FLOPS_PER_S, "device": "H100 SXM5 80GB", "dtype": "bf16", "confidence": "high"}
    return {
        "type": "provenance",
        "step": step,
        "mode": "smart",
        "method": "trace",
        "exact": True,
        "attention": "full",
        "coverage": 1.0,
        "law": {"forward": {"positions": "2617245696"}, "backward": {"positions": "5234491392"}},
        "peak": {**peak, "source": "NVIDIA H100 datasheet", "kind": "datasheet", "fraction": 1.0},
        "device_count": 8,
    }


def _row(numbers: list[int], clock: dict[str, float], seconds: dict[str, float]) -> dict[str, Any]:
    chance = random.Random(numbers[0])
    times = [STEP_SECONDS * (1 + abs(chance.gauss(0, 0.02))) for _ in numbers]
    if chance.random() < 0.002:
        times[chance.randrange(len(times))] *= 5
    count, spent = len(numbers), sum(times)
    _spend_gap(numbers, spent, clock, seconds)
    losses = [round(1.9 + 9.1 * (1 + step / 400) ** -0.4 + chance.gauss(0, 0.03), 6) for step in numbers]
    return {
        "type": "row",
        "step": numbers[-1],
        "unix_time": clock["unix_time"],
        "detailed": numbers[-1] % 1000 == 0,
        "values": _values(count, spent, sum(losses) / count, numbers[-1], seconds),
        "steps": {
            "step": numbers,
            "seconds": [round(value, 9) for value in times],
            "samples": [8] * count,
            "tokens": [TOKENS] * count,
            "real_tokens": [TOKENS - 1000] * count,
            "model_flops": [MODEL_FLOPS] * count,
            "hardware_flops": [HARDWARE_FLOPS] * count,
            "recompute_flops": [RECOMPUTE_FLOPS] * count,
            "input_wait_seconds": [WAIT_SECONDS] * count,
            "loss": losses,
        },
        "ledger": _ledger(numbers[-1], seconds),
        "exact": True,
        "peak": {"dtype": "bf16", "flops_per_s": PEAK_FLOPS_PER_S},
    }


def _spend_gap(numbers: list[int], spent: float, clock: dict[str, float], seconds: dict[str, float]) -> None:
    seconds["train"] += spent
    for name, each in _PARTS_OF_STEPS.items():
        seconds[name] += each * len(numbers)
    clock["unix_time"] += spent
    for name, every, length in (
        ("eval", EVAL_EVERY_STEPS, EVAL_SECONDS),
        ("checkpoint", CHECKPOINT_EVERY_STEPS, CHECKPOINT_SECONDS),
    ):
        if numbers[-1] // every > (numbers[0] - 1) // every:
            seconds[name] += length
            clock["unix_time"] += length


def _ledger(step: int, seconds: dict[str, float]) -> dict[str, Any]:
    wall = sum(value for name, value in seconds.items() if name not in _PARTS_OF_STEPS)
    names = {"samples": 8, "tokens": TOKENS, "model_flops": MODEL_FLOPS, "hardware_flops": HARDWARE_FLOPS}
    totals = {name: step * each for name, each in names.items()}
    return {"steps": step, "totals": totals, "seconds": {**seconds, "wall": wall}}


def _values(count: int, spent: float, loss: float, step: int, seconds: dict[str, float]) -> dict[str, float]:
    capacity = spent * PEAK_FLOPS_PER_S
    return {
        "training/loss": loss,
        "training/lr": 3e-4 * (0.55 + 0.45 * math.cos(step / 400_000)),
        "perf/mfu": count * MODEL_FLOPS / capacity,
        "perf/mfu_percent": 100 * count * MODEL_FLOPS / capacity,
        "perf/hfu_percent": 100 * count * HARDWARE_FLOPS / capacity,
        "perf/step_time": spent / count,
        "perf/tokens_per_second": 8 * count * TOKENS / spent,
        "perf/samples_per_second": 64 * count / spent,
        "perf/padding_percent": 6.1,
        "perf/recompute_percent": 19.0,
        "perf/input_wait_percent": 100 * WAIT_SECONDS * count / spent,
        "perf/memory_allocated_gib": 61.5,
        "perf/memory_reserved_gib": 70.25,
        "ranks/reporting": 8,
        "ranks/longest_input_wait_rank": 3,
        "ranks/longest_input_wait_percent": 2.5,
        "total/tokens": 8 * step * TOKENS,
    }


if __name__ == "__main__":
    main()
