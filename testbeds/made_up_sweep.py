"""A sweep that was never run: results with the shape of real ones, for tests and for timing the report.

python testbeds/made_up_sweep.py FOLDER [TRIALS]
"""

import json
import math
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flopwatch.records.trial import (
    Measured,
    MemoryUse,
    Outcome,
    StepCost,
    StepTimes,
    TrialResult,
    TrialSpec,
    content_key,
)

LABELS = {
    "standard": "StandardTrainer",
    "dpsgd": "DPSGDTrainer",
    "ghost": "DPGhostClippingTrainer",
    "fast": "DPFastGradientClippingTrainer",
}
PARAMETERS = {"tiny": 3_700_000, "small": 17_500_000, "medium": 42_000_000, "1b": 1_100_000_000}
DEVICE_BYTES = 24 * 2**30
PEAK_FLOPS_PER_S = 121e12
ENVIRONMENT = {
    "flopwatch": "0.1.0",
    "torch": "2.13.0",
    "python": "3.11.9",
    "device": "NVIDIA L4",
    "driver": "575.57",
    "host": "node-a",
    "git": "df3dee9",
}


def main() -> None:
    folder, trials = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    specs = many_specs(trials) if trials else example_specs()
    write_sweep(folder, [make_result(spec) for spec in specs], specs)
    print(f"{len(specs)} trials in {folder}")


def example_specs() -> list[TrialSpec]:
    """Two models, one of them also with checkpointing: 4 trainers x 5 batch sizes x 4 sequence lengths."""
    groups = [("small", False), ("small", True), ("medium", False)]
    return [
        TrialSpec(trainer, model, batch, seq, label=LABELS[trainer], device="cuda", checkpointing=checkpointing)
        for model, checkpointing in groups
        for trainer in LABELS
        for batch in (4, 8, 16, 32, 64)
        for seq in (128, 256, 512, 1024)
    ]


def many_specs(trials: int) -> list[TrialSpec]:
    """Models, dtypes, and as many batch sizes and sequence lengths as it takes."""
    groups = [(model, dtype) for model in ("tiny", "small", "medium") for dtype in ("fp32", "bf16")]
    side = max(1, math.ceil(math.sqrt(trials / (len(LABELS) * len(groups)))))
    specs = [
        TrialSpec(trainer, model, 2 * batch, 64 * seq, label=LABELS[trainer], device="cuda", dtype=dtype)
        for model, dtype in groups
        for trainer in LABELS
        for batch in range(1, side + 1)
        for seq in range(1, side + 1)
    ]
    return specs[:trials]


def trial_name(spec: TrialSpec) -> str:
    more = "_ckpt" if spec.checkpointing else ""
    return f"{spec.label or spec.trainer}_bs{spec.batch_size}_seq{spec.seq_len}_{spec.model}_{spec.dtype}{more}"


def make_result(spec: TrialSpec, *, with_accidents: bool = True) -> TrialResult:
    """Ends as such a configuration would: runs, does not fit, is not supported, or has an accident."""
    chance = random.Random(f"{trial_name(spec)} {spec.seed}")
    if spec.checkpointing and spec.trainer in ("dpsgd", "ghost", "fast"):
        return _ended(spec, "unsupported", reason="Opacus does not work with gradient checkpointing")
    if made_up_bytes(spec) > DEVICE_BYTES:
        return _out_of_memory(spec, inferred=made_up_bytes(spec) > 2 * DEVICE_BYTES)
    accident = chance.random()
    if with_accidents and accident < 0.03:
        return _accident(spec, accident)
    log = "\n".join(f"step {step}: loss {11 - step / 50:.4f}, {made_up_seconds(spec):.4f} s" for step in range(30))
    seconds = 20 + 14 * made_up_seconds(spec)
    return _ended(spec, "ok", measured=_measured(spec, chance), phase="done", seconds=seconds, log_tail=log)


def made_up_seconds(spec: TrialSpec) -> float:
    """Of a step: hooks cost memory traffic, ghost a Gram matrix that grows with the square of the sequence."""
    tokens, width = spec.batch_size * spec.seq_len, math.sqrt(PARAMETERS[spec.model] / 12)
    standard = 6 * PARAMETERS[spec.model] * tokens / (0.42 * PEAK_FLOPS_PER_S) + 0.004
    speed = 0.6 if spec.dtype == "bf16" else 1.0
    per_sample = 14 * PARAMETERS[spec.model] * spec.batch_size / 300e9
    factor = {"standard": 1.0, "dpsgd": 1.25, "fast": 2.0, "ghost": 1.6 + spec.seq_len / width * 0.9}[spec.trainer]
    seconds = standard * factor * (1.33 if spec.checkpointing else 1.0) + (per_sample if spec.trainer == "dpsgd" else 0)
    return seconds * speed


def made_up_bytes(spec: TrialSpec) -> float:
    parameters, tokens = PARAMETERS[spec.model], spec.batch_size * spec.seq_len
    activations = tokens * math.sqrt(parameters) * (24 if spec.checkpointing else 110)
    per_sample = {"standard": 0.0, "dpsgd": 4.0 * parameters, "fast": 0.8 * parameters, "ghost": 24.0 * spec.seq_len**2}
    return 16 * parameters + activations + per_sample[spec.trainer] * spec.batch_size


def _measured(spec: TrialSpec, chance: random.Random) -> Measured:
    seconds = made_up_seconds(spec) * chance.uniform(0.995, 1.005)
    spread = chance.choice([0.004, 0.006, 0.01, 0.04])
    peak = int(made_up_bytes(spec))
    flops = 6 * PARAMETERS[spec.model] * spec.batch_size * spec.seq_len
    more = {"standard": 1.0, "dpsgd": 1.22, "fast": 1.9, "ghost": 1.7 + spec.seq_len / 400}[spec.trainer]
    hardware = int(flops * more * (4 / 3 if spec.checkpointing else 1))
    denominator = seconds * PEAK_FLOPS_PER_S
    return Measured(
        parameters=PARAMETERS[spec.model],
        steps=_step_times(seconds, spread, spec.steps),
        phase_seconds={"forward": seconds * 0.3, "backward": seconds * 0.6, "optimizer": seconds * 0.1},
        samples_per_s=spec.batch_size / seconds,
        tokens_per_s=spec.batch_size * spec.seq_len / seconds,
        memory=_memory(spec, peak),
        cost=StepCost(
            model_flops=flops,
            hardware_flops=hardware,
            method="counted",
            coverage=1.0,
            peak={"flops_per_s": PEAK_FLOPS_PER_S, "device": "NVIDIA L4", "dtype": spec.dtype, "kind": "datasheet"},
            mfu=flops / denominator,
            hfu=hardware / denominator,
        ),
        trace=f"runs/{trial_name(spec)}/trace.json.gz",
    )


def _memory(spec: TrialSpec, peak: int) -> MemoryUse:
    return MemoryUse(
        allocated_bytes=int(peak * 0.93),
        reserved_bytes=peak,
        alloc_retries=2 if peak > 0.9 * DEVICE_BYTES else 0,
        device_bytes=DEVICE_BYTES,
        host_bytes=1_400_000_000,
        baseline_bytes=420_000_000,
        by_phase=_by_phase(spec, peak),
    )


def _step_times(seconds: float, spread: float, count: int) -> StepTimes:
    low, high = seconds * (1 - spread), seconds * (1 + spread)
    return StepTimes(count, seconds, low, high, low * 0.99, high * 1.02, high * 1.1, seconds * 8, spread > 0.025)


def _by_phase(spec: TrialSpec, peak: int) -> dict[str, int]:
    at_rest = 8 * PARAMETERS[spec.model]
    forward = int(at_rest + (peak - at_rest) * (0.7 if spec.trainer == "standard" else 0.5))
    return {"build": at_rest // 2, "forward": forward, "backward": int(peak * 0.93), "optimizer": at_rest * 3 // 2}


def _out_of_memory(spec: TrialSpec, *, inferred: bool) -> TrialResult:
    if inferred:
        return _ended(spec, "oom_inferred", reason="not run: a smaller batch was out of memory already")
    needed = f"{made_up_bytes(spec) / 2**30:.2f} GiB"
    message = f"CUDA out of memory. Tried to allocate {needed}. GPU 0 has a total capacity of 24.00 GiB"
    exception = {"type": "OutOfMemoryError", "message": message}
    log = "\n".join(f'  File "trainer.py", line {line}, in backward' for line in range(12))
    return _ended(
        spec,
        "oom_device",
        reason=f"out of memory on NVIDIA L4: {needed}",
        evidence={"exception": exception, "exit_code": 1},
        phase="warmup",
        step=0,
        log_tail=f"{log}\ntorch.OutOfMemoryError: {message}",
        seconds=17.0,
    )


def _accident(spec: TrialSpec, chance: float) -> TrialResult:
    if chance < 0.008:
        return _ended(
            spec, "crash", reason="ended by SIGKILL, which nobody here sent", evidence={"signal": "SIGKILL"},
            phase="measure", step=4, log_tail="step 3: loss 10.31\nstep 4: loss 10.29", seconds=31.0,
        )  # fmt: skip
    if chance < 0.014:
        stacks = (
            'Thread 0x7f3a (most recent call first):\n  File "threading.py", line 324 in wait\n  File "data.py", line 9'
        )
        return _ended(
            spec, "hang", reason="no progress for 600 s", evidence={"killed_by": "flopwatch", "signal": "SIGKILL"},
            phase="measure", step=7, stacks=stacks, log_tail="step 7", seconds=640.0,
        )  # fmt: skip
    message = f"expected a tensor of {spec.batch_size} samples on line {spec.seq_len} of /home/me/model.py"
    log = f'Traceback (most recent call last):\n  File "/home/me/model.py", line 71\nRuntimeError: {message}'
    evidence = {"exception": {"type": "RuntimeError", "message": message}, "exit_code": 1}
    return _ended(
        spec, "error", reason=f"RuntimeError: {message}", evidence=evidence, phase="build", log_tail=log, seconds=9.0
    )


def _ended(spec: TrialSpec, outcome: Outcome, *, seconds: float | None = None, **more: Any) -> TrialResult:
    name = trial_name(spec)
    return TrialResult(
        name=name,
        key=content_key(spec, ENVIRONMENT),
        spec=spec,
        outcome=outcome,
        seconds=seconds,
        unix_time=None if seconds is None else 1_763_000_000.0,
        environment=ENVIRONMENT,
        command=f"flopwatch trial --spec trials/{name}/spec.json",
        **more,
    )


def write_sweep(folder: Path, results: Iterable[TrialResult], planned: Sequence[TrialSpec] | None = None) -> Path:
    """`sweep.json` and `results.jsonl`, as the runner writes them."""
    results = list(results)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    trials = [{"name": result.name, "key": result.key, "spec": result.spec.to_json()} for result in results]
    known = {trial["name"] for trial in trials}
    trials += [
        {"name": trial_name(spec), "key": content_key(spec, ENVIRONMENT), "spec": spec.to_json()}
        for spec in planned or ()
        if trial_name(spec) not in known
    ]
    sweep = {"format": 1, "trials": trials, "created": 1_763_000_000.0, "engine": "local"}
    (folder / "sweep.json").write_text(json.dumps(sweep))
    with (folder / "results.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(result.to_json()) + "\n" for result in results)
    return folder


if __name__ == "__main__":
    main()
