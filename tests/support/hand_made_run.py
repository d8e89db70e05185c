"""A run of two sessions and seven steps, whose every number can be checked by hand.

Ten steps were run: session one logged the steps 1 to 6 in three windows and was killed; session two resumed after step
4 and ran the steps 5 to 7. An evaluation of 3 s is between the first and the second window, a checkpoint of 1 s before
the end of session one, and another evaluation of 2 s after the last window.
"""

import json

PEAK = {
    "flops_per_s": 1000.0, "device": "Abacus", "dtype": "fp32", "source": "counted beads", "kind": "datasheet",
    "confidence": "high", "fraction": 1.0,
}  # fmt: skip


def start(session, unix_time, *, resumed=None, ledger=None, **more):
    return {
        "type": "run", "session": session, "unix_time": unix_time, "output_dir": "runs/by-hand",
        "resumed_after_step": resumed, "total_steps": 8, "rank": 0, "world_size": 1, "config": {"mode": "smart"},
        "environment": {"host": "desk", "device": "Abacus", "torch": "2.13.0", "python": "3.12.1"},
        "ledger": ledger or {}, "format": 1, **more,
    }  # fmt: skip


def provenance(step=1, **more):
    return {
        "type": "provenance", "step": step, "mode": "smart", "method": "trace", "exact": True, "attention": "full",
        "coverage": 1.0, "peak": PEAK,
        "device_count": 1, **more,
    }  # fmt: skip


def row(steps, seconds, losses, unix_time, spent, *, mfu=30.0, values=None, **more):
    timed = [value for value in seconds if value is not None]
    found = {
        "training/loss": sum(losses) / len(losses),
        "perf/mfu_percent": mfu,
        "perf/hfu_percent": mfu + 10,
        "perf/step_time": sum(timed) / len(timed),
        "perf/tokens_per_second": 10 * len(timed) / sum(timed),
    }
    return {
        "type": "row", "step": steps[-1], "unix_time": unix_time, "detailed": False, "values": found | (values or {}),
        "steps": {"step": steps, "seconds": seconds, "loss": losses},
        "ledger": {"steps": steps[-1], "totals": {}, "seconds": spent}, "exact": True, "peak": {"flops_per_s": 1000.0},
        **more,
    }  # fmt: skip


def records():
    return [
        start("one", 1000.0, ledger={"seconds": {"start_up": 5.0, "wall": 5.0}}),
        provenance(),
        row([1, 2], [2.0, 4.0], [9.0, 7.0], 1006.0, {"start_up": 5.0, "train": 6.0, "wall": 11.0}, mfu=20.0),
        {"type": "notice", "step": 2, "level": "warning", "code": "slow", "message": "Step 2 was slow."},
        row([3, 4], [1.0, 3.0], [6.0, 4.0], 1013.0, {"start_up": 5.0, "train": 10.0, "eval": 3.0, "wall": 18.0}),
        row([5, 6], [1.0, 1.0], [3.5, 3.5], 1016.0,
            {"start_up": 5.0, "train": 12.0, "eval": 3.0, "checkpoint": 1.0, "wall": 21.0}),
        start("two", 1030.0, resumed=4, ledger={"seconds": {"start_up": 5.0, "train": 10.0, "eval": 3.0}}),
        provenance(5),
        row([5, 6, 7], [1.0, 2.0, 1.0], [3.0, 2.0, 1.0], 1040.0,
            {"start_up": 9.0, "train": 14.0, "eval": 3.0, "checkpoint": 1.0, "rerun": 2.0, "restart": 10.0,
             "wall": 39.0}, mfu=50.0, values={"training/<temperature>": 0.5}),
        {
            "type": "summary", "step": 7, "unix_time": 1042.5, "exact": True,
            "values": {
                "time/start_up_seconds": 9.0, "time/train_seconds": 14.0, "time/eval_seconds": 5.0,
                "time/checkpoint_seconds": 1.0, "time/rerun_seconds": 2.0, "time/restart_seconds": 10.0,
                "time/wall_seconds": 41.0,
            },
        },
    ]  # fmt: skip


def write_run(folder, lines=None):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "training_log.jsonl"
    written = "".join(json.dumps(line) + "\n" for line in (records() if lines is None else lines))
    path.write_text(written, encoding="utf-8")
    return path
