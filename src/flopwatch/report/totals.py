"""How many ended how, per trainer and in all. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from flopwatch.report.cells import positive
from flopwatch.report.columns import privacy_of, trainer_name, trainer_order
from flopwatch.report.records import Totals, TrainerTotals
from flopwatch.trial_records import NOT_RUN, OUT_OF_MEMORY, TrialResult, TrialSpec

_LONGEST_SWEEP_SECONDS = 5 * 365 * 86400.0
"""A machine whose clock has no battery begins in 1970: what is longer is no time anybody waited."""


def sweep_totals(results: Iterable[TrialResult], missing: int) -> Totals:
    results = list(results)
    counts = Counter(str(result.outcome) for result in results)
    if missing:
        counts["missing"] = missing
    lives = [(result.unix_time, positive(result.seconds) or 0.0) for result in results]
    return Totals(
        trials=len(results) + missing,
        by_outcome=dict(counts.most_common()),
        trial_seconds=sum(seconds for _, seconds in lives),
        wall_seconds=_wall_seconds(lives),
    )


def _wall_seconds(lives: Sequence[tuple[float | None, float]]) -> float | None:
    """From the first start to the last end, by the clocks of all hosts; None where one of them cannot be right."""
    ran = [(start, start + seconds) for start, seconds in lives if start is not None]
    if not ran:
        return None
    first, last = min(start for start, _ in ran), max(end for _, end in ran)
    return last - first if first >= 0 and last - first < _LONGEST_SWEEP_SECONDS else None


def was_tried(result: TrialResult) -> bool:
    """Whether its end says something of its trainer; one refused before its start, or cancelled, does not."""
    if result.outcome == "invalid":
        return result.unix_time is not None
    return result.outcome not in (*NOT_RUN, "cancelled")


def trainer_totals(results: Iterable[TrialResult], missing: Iterable[TrialSpec]) -> tuple[TrainerTotals, ...]:
    by_trainer: dict[str, list[TrialResult]] = defaultdict(list)
    missing_of: Counter[str] = Counter()
    specs: dict[str, TrialSpec] = {}
    for result in results:
        by_trainer[trainer_name(result.spec)].append(result)
        specs.setdefault(trainer_name(result.spec), result.spec)
    for spec in missing:
        missing_of[trainer_name(spec)] += 1
        specs.setdefault(trainer_name(spec), spec)
    shared = _shared_configurations(list(by_trainer.values()))
    names = trainer_order((name, spec.trainer) for name, spec in specs.items())
    return tuple(_one_trainer(specs[name], by_trainer[name], missing_of[name], shared) for name in names)


def _one_trainer(spec: TrialSpec, results: Sequence[TrialResult], missing: int, shared: set[str]) -> TrainerTotals:
    tried = [result for result in results if was_tried(result)]
    ok = [result for result in tried if result.outcome == "ok"]
    too_large = sum(result.outcome in OUT_OF_MEMORY for result in tried)
    peaks = [peak for result in ok if (peak := positive(result.measured.memory.peak_bytes))]
    shared_peaks = [
        peak
        for result in ok
        if _configuration(result.spec) in shared and (peak := positive(result.measured.memory.peak_bytes))
    ]
    counts = Counter(str(result.outcome) for result in results)
    return TrainerTotals(
        trainer=trainer_name(spec),
        privacy=privacy_of(spec),
        tried=len(tried),
        ok=len(ok),
        out_of_memory=too_large,
        failed=len(tried) - len(ok) - too_large,
        not_run=len(results) - len(tried) + missing,
        success_rate=len(ok) / len(tried) if tried else None,
        mean_peak_bytes=fmean(peaks) if peaks else None,
        peaks=len(peaks),
        shared_mean_peak_bytes=fmean(shared_peaks) if shared_peaks else None,
        shared_peaks=len(shared_peaks),
        by_outcome=dict(counts) | ({"missing": missing} if missing else {}),
    )


def _shared_configurations(by_trainer: Sequence[Sequence[TrialResult]]) -> set[str]:
    """Those every trainer ran; a trainer that only ran small ones would look frugal otherwise."""
    if len(by_trainer) < 2:
        return set()
    ran = [
        {_configuration(r.spec) for r in results if r.outcome == "ok" and positive(r.measured.memory.peak_bytes)}
        for results in by_trainer
    ]
    return set.intersection(*ran)


def _configuration(spec: TrialSpec) -> str:
    return f"{spec.model} {spec.dtype} {spec.checkpointing} {spec.device} {spec.batch_size} {spec.seq_len}"
