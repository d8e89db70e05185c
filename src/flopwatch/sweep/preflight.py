"""The preflight of a sweep: finds out which trainer can train which model, before the first trial.

A separate process (`worker/preflight_main.py`) tries each pair on a tiny copy of the model. This module starts that
process, and starts it again after a crash. This module itself never loads torch.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from flopwatch.decode import Stored, read_or_none
from flopwatch.errors import InputError
from flopwatch.files import read_json, read_lines, write_json
from flopwatch.process import descendants
from flopwatch.records.trial import COMMAND, TrialSpec
from flopwatch.records.trial_files import PREFLIGHT, log_file
from flopwatch.sweep.folder import Trial
from flopwatch.sweep.host.processes import dies_with
from flopwatch.sweep.spec.parsing import needs_one_process

REQUEST = "preflight_request.json"
PROGRESS = "preflight.jsonl"
_MOST_MISTAKES = 5


Pair: TypeAlias = tuple[str, str, bool, str]
"""The settings of a trial that decide whether it can run at all, whatever its batch size and length."""


@dataclass(frozen=True, slots=True)
class PreflightResult(Stored):
    """The result of the preflight for one pair of trainer and model.

    Attributes:
        supported: False only if it is certain that the trainer cannot train the model.
        reason: Why the trainer cannot train the model, and what to do; or why the pair was not tried; otherwise empty.
        tried: False if nothing could be tried, so that `supported` is only a guess.
        layers: For a DP trainer: for each method by which Opacus handles layers (`ghost`, `hook`, `functorch`), the
            classes of these layers and their share of the full model's trainable parameters.
        model_flops: Model FLOPs of one standard training step of the full model at `batch_size` x `seq_len`.
        difference: Relative difference between a DP trainer's clipped gradients and those of a loop over the samples,
            on the tiny copy.
        is_mistake: Whether the configuration itself is wrong (a misspelt name, a missing package), so that it is
            unknown whether the trainer can train the model.
    """

    trainer: str
    model: str
    checkpointing: bool
    dtype: str
    supported: bool
    reason: str = ""
    tried: bool = True
    parameters: int | None = None
    layers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    model_flops: int | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    difference: float | None = None
    seconds: float | None = None
    is_mistake: bool = False

    @property
    def shares(self) -> dict[str, float]:
        """For each method of Opacus, its share of the trainable parameters: `{"ghost": 0.99, "functorch": 0.01}`."""
        return {path: sum(by_class.values()) for path, by_class in self.layers.items()}


def pair_of(one: TrialSpec | PreflightResult) -> Pair:
    return one.trainer, one.model, one.checkpointing, one.dtype


def result_for(spec: TrialSpec) -> PreflightResult:
    """The result of a trial's pair before anything is known."""
    return PreflightResult(*pair_of(spec), supported=True, batch_size=spec.batch_size, seq_len=spec.seq_len)


def refusals(found: Mapping[Pair, PreflightResult], specs: Sequence[TrialSpec]) -> Callable[[TrialSpec], str | None]:
    """A function that returns why a trial cannot run; None if it can, or if the preflight did not try its options."""
    tried = _smallest(specs)

    def why_not(spec: TrialSpec) -> str | None:
        if reason := needs_one_process(spec):
            return reason
        result, asked = found.get(pair_of(spec)), tried.get(pair_of(spec))
        was_tried = asked is not None and asked.options == spec.options
        return result.reason if result is not None and not result.supported and was_tried else None

    return why_not


def preflight_trials(
    sweep: Path, trials: Sequence[Trial], show: Callable[[Mapping[Pair, PreflightResult]], object]
) -> Callable[[Trial], str | None]:
    """Run the preflight of these trials; return a function that returns why a trial cannot run, or None if it can.

    `show` is called with the results of the preflight.

    Raises:
        InputError: A configuration is unusable, such as one with a misspelt name. A sweep that skips its trials would
            look complete.
    """
    specs = [trial.spec for trial in trials if trial.spec.trainer != COMMAND]
    found = run_preflight(sweep, specs) if specs else {}
    show({pair: result for pair, result in found.items() if not result.is_mistake})
    mistakes = [
        each.reason if repr(each.trainer) in each.reason else f"{each.trainer} on {each.model}: {each.reason}"
        for each in found.values()
        if each.is_mistake
    ]
    if mistakes:
        more = f"; and {len(mistakes) - _MOST_MISTAKES} more" if len(mistakes) > _MOST_MISTAKES else ""
        raise InputError(
            f"no trial was run: {'; '.join(mistakes[:_MOST_MISTAKES])}{more}. "
            "Correct it, or leave it out with --exclude"
        )
    why_not = refusals(found, specs)
    return lambda trial: why_not(trial.spec)


def run_preflight(
    sweep: Path, specs: Sequence[TrialSpec], timeout_seconds: float = 300.0
) -> dict[Pair, PreflightResult]:
    """Try every pair of trainer and model of these trials, write `preflight.json`, and return the results.

    If a pair crashes, or all pairs together take too long, its trials are not refused, because it is unknown whether
    they can run. Trials that are shell commands are not tried. The log is `logs/preflight.log`.
    """
    smallest = _smallest(specs)
    log_file(sweep, "preflight").parent.mkdir(parents=True, exist_ok=True)
    (sweep / PROGRESS).unlink(missing_ok=True)
    deadline = time.monotonic() + timeout_seconds
    found: dict[Pair, PreflightResult] = {}
    while left := [pair for pair in smallest if pair not in found]:
        write_json(sweep / REQUEST, [smallest[pair].to_json() for pair in left])
        ending = _run_worker(sweep, deadline)
        reason = f"not known: the preflight did not finish, {ending}; see logs/preflight.log in the sweep's folder"
        found |= _read_results(list(read_lines(sweep / PROGRESS)))
        # Pairs are tried in order, so the first one without a result ended the process.
        lost = [pair for pair in left if pair not in found]
        for pair in lost if time.monotonic() >= deadline else lost[:1]:
            found[pair] = replace(result_for(smallest[pair]), reason=reason, tried=False)
    # A resumed sweep tries only the pairs of trials that it still has to run.
    before = _read_results(read_json(sweep / PREFLIGHT))
    before = {pair: result for pair, result in before.items() if not result.is_mistake}
    write_json(sweep / PREFLIGHT, [result.to_json() for result in (before | found).values()])
    for name in (REQUEST, PROGRESS):
        (sweep / name).unlink(missing_ok=True)
    return found


def _read_results(content: object) -> dict[Pair, PreflightResult]:
    rows = content if isinstance(content, list) else []
    results = [result for row in rows if (result := read_or_none(PreflightResult, row)) is not None]
    return {pair_of(result): result for result in results}


def _smallest(specs: Sequence[TrialSpec]) -> dict[Pair, TrialSpec]:
    """For each pair the first trial that has it, with the smallest batch size and length of all."""
    found: dict[Pair, TrialSpec] = {}
    for spec in specs:
        if spec.trainer != COMMAND:
            known = found.setdefault(pair_of(spec), spec)
            batch_size, seq_len = min(spec.batch_size, known.batch_size), min(spec.seq_len, known.seq_len)
            found[pair_of(spec)] = replace(known, batch_size=batch_size, seq_len=seq_len)
    return found


def _run_worker(sweep: Path, deadline: float) -> str:
    # Hide GPUs: a tiny copy of the model needs none, and a CUDA context would take memory from a running trial.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    with open(log_file(sweep, "preflight"), "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flopwatch.sweep.worker.preflight_main", str(sweep.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **hidden, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=dies_with(os.getpid()),
        )
        try:
            code = process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "because it took too long"
        finally:
            below = descendants(process.pid)
            for end, target in [(os.killpg, process.pid), *((os.kill, pid) for pid in below)]:
                with contextlib.suppress(ProcessLookupError):
                    end(target, signal.SIGKILL)
            process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    return f"because its process {how}"
