"""Inject known losses into real trainings on this CPU, and compare the waterfall with the training's own clock.

Prints the table of docs/why.md: `PYTHONPATH=.:tests python -m support.injected_losses`
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwatch.runs import read_log
from flopwatch.runs.waterfall import Waterfall, waterfall_of
from support.torchrun import outputs_of_ranks
from testbeds.injected_losses import LAYER_FLOPS, LAYERS, STEPS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "testbeds" / "injected_losses.py"
CASES = (
    "plain",
    "input",
    "eval",
    "checkpoint",
    "recompute",
    "padding",
    "optimizer",
    "restart",
)
WHERE = {"plain": None, "input": "input_wait"}
"""The loss in which an injected amount has to appear, if its key is not the name of the case."""
STEP_GROUP = ("between", "below_peak", "compile", "stall", "count", "host", "other", "outside")
"""What the script cannot tell apart with its own clock: together they are the rest of the wall time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One training: points of each loss by the script's clock (`true`) and by flopwatch (`found`)."""

    case: str
    true: Mapping[str, float]
    found: Mapping[str, float]
    mfu_percent: float
    sum_percent: float

    @property
    def worst_points(self) -> float:
        return max(abs(self.true[key] - self.found[key]) for key in self.true)


def run_case(case: str, folder: Path) -> Outcome:
    """Train once (for `restart` twice), and compare."""
    if case == "restart":
        first = _train(folder, case, "first")
        time.sleep(2.0)
        last = _train(folder, case, "second")
        true = _with_restart(first, last)
    else:
        true = _true_points(case, _train(folder, case))
    found = waterfall_of(read_log(folder / "run" / "training_log.jsonl"))
    assert found is not None
    total = found.mfu_percent + sum(loss.points for loss in found.losses)
    true["the rest"] = 100 - sum(true.values())
    return Outcome(case, true, _found_points(found, true), found.mfu_percent, total)


def _train(folder: Path, *arguments: str) -> dict[str, Any]:
    output = outputs_of_ranks(SCRIPT, str(folder), *arguments, ranks=1)[0]
    result: dict[str, Any] = json.JSONDecoder().raw_decode(output.split("RESULT ")[1])[0]
    return result


def _share(result: Mapping[str, Any], use: str, wall_seconds: float) -> float:
    return 100 * float(result["seconds"].get(use, 0.0)) / wall_seconds


def _true_points(case: str, result: Mapping[str, Any]) -> dict[str, float]:
    wall = result["wall"]
    true = {
        "start_up": 100 * result["start_up"] / wall,
        "input_wait": _share(result, "input", wall),
        "eval": _share(result, "eval", wall),
        "checkpoint": _share(result, "checkpoint", wall),
        "optimizer": _share(result, "optimizer", wall),
        "restart": 0.0,
    }
    return true | _true_flops(case, STEPS, result["peak"], wall)


def _true_flops(case: str, steps: int, peak: float, wall: float) -> dict[str, float]:
    """Points of FLOPs by a closed formula: forward, both gradients, except for that of the token ids."""
    forward = LAYERS * LAYER_FLOPS * steps
    whole = 3 * forward
    useful = whole / 2 if case == "padding" else whole
    points = 100 / peak / wall
    return {
        "MFU": useful * points,
        "padding": (whole - useful) * points,
        "recompute": forward / 2 * points if case == "recompute" else 0.0,
        "extra_passes": 0.0,
    }


def _with_restart(first: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, float]:
    """Both sessions on one wall time: the pause between the processes and the steps after the checkpoint are lost."""
    wall = last["wall"] + last["process_start"] - first["process_start"]
    result = {
        "wall": wall,
        "peak": last["peak"],
        "start_up": first["start_up"] + last["start_up"],
        "seconds": {use: last["seconds"][use] + first["kept"][use] for use in ("input", "optimizer")},
    }
    lost = last["process_start"] - first["end"] + first["again"]
    return _true_points("restart", result) | {"restart": 100 * lost / wall}


def _found_points(found: Waterfall, true: Mapping[str, float]) -> dict[str, float]:
    points = {key: found.points(key) for key in true if key not in ("MFU", "the rest")}
    points["MFU"] = found.mfu_percent
    points["the rest"] = sum(found.points(key) for key in STEP_GROUP)
    return points


def table(outcomes: list[Outcome]) -> str:
    """One row per case: the injected loss, and the largest error of any loss."""
    lines = [
        "| injected | true | found | largest error of any loss | MFU of the run | sum |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in outcomes:
        key = WHERE.get(one.case, one.case)
        shown = ("", "") if key is None else (f"{one.true[key]:.2f}", f"{one.found[key]:.2f}")
        worst = max(one.true, key=lambda name: abs(one.true[name] - one.found[name]))
        lines.append(
            f"| {one.case} | {shown[0]} | {shown[1]} | {one.worst_points:.2f} ({worst}) "
            f"| {one.mfu_percent:.2f} | {one.sum_percent:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=CASES)
    arguments = parser.parse_args()
    outcomes = []
    for case in arguments.cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(run_case(case, Path(folder)))
    sys.stdout.write(f"{table(outcomes)}\n")


if __name__ == "__main__":
    main()
