"""What `flopwatch why` and the page of a run say first: the verdict or why there is none, and what to try next."""

from dataclasses import dataclass

from flopwatch.runs.comparison import total
from flopwatch.runs.reading import RunLog
from flopwatch.runs.waterfall.losses import Loss, Waterfall, seconds_of, undivided_note
from flopwatch.runs.waterfall.texts import in_shell
from flopwatch.runs.waterfall.verdicts import Verdict, facts_of, verdict_of, why_no_verdict

LEAST_DRAWN_POINTS = 0.05
"""A smaller loss would be printed as 0.0 points; all of them share one line of `flopwatch why`."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a run's log says in words.

    Attributes:
        sentence: The verdict, or why the log supports none.
        verdict: None if the log supports none.
        next_step: What to try first; empty if there is nothing to advise.
        losses: The losses that cost most, largest first.
        notes: What limits these figures, without what the losses have said.
    """

    sentence: str
    verdict: Verdict | None = None
    next_step: str = ""
    losses: tuple[Loss, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def reservation(self) -> str:
        """A sentence about what limits the verdict; empty if nothing does."""
        return self.verdict.reservation if self.verdict else ""


def conclusion_of(log: RunLog, waterfall: Waterfall | None) -> Conclusion:
    """What to say about a run, by its waterfall and the end of its log; `read_around` is enough."""
    if waterfall is None:
        missing = what_is_missing(log)
        return Conclusion(f"{missing[0].upper()}{missing[1:]}.")
    facts = facts_of(log)
    verdict = verdict_of(waterfall, facts)
    losses = tuple(loss for loss in waterfall.largest() if abs(loss.points) >= LEAST_DRAWN_POINTS)
    # The advice of this loss says the same.
    said = undivided_note(str(log.path.parent)) if any(loss.key == "below_peak" for loss in losses) else None
    notes = tuple(note for note in waterfall.notes if note != said)
    if verdict is None:
        return Conclusion(why_no_verdict(waterfall, facts) or "", losses=losses, notes=notes)
    is_too_low = verdict.key == "peak_too_low"
    named = [loss for loss in waterfall.losses if (loss.points < 0 if is_too_low else loss.key in verdict.losses)]
    advice = [loss.advice for loss in sorted(named, key=lambda loss: -loss.points) if loss.advice]
    return Conclusion(verdict.sentence, verdict, advice[0] if advice else "", losses, notes)


def _measure(log: RunLog) -> str:
    dtypes = log.provenances[-1].dtypes if log.provenances else ()
    return "flopwatch peak --measure" + (f" --dtype {dtypes[0]}" if dtypes else "")


def _when_the_first_row_comes(log: RunLog) -> str:
    config = log.starts[-1].config if log.starts else {}
    steps, seconds = config.get("log_every", "log_every"), config.get("log_seconds", "log_seconds")
    if log.summary is not None:
        return "the run ended before its first one"
    return f"the first one is written after {steps} steps or {seconds} s, and after 6 steps at the earliest"


def what_is_missing(log: RunLog) -> str:
    """Why a log gives no waterfall, and what to do."""
    place = in_shell(str(log.path.parent))
    if not log.rows:
        return f"the log has no row of metrics yet; {_when_the_first_row_comes(log)}"
    if not total(log, "total/model_flops"):
        return f"the FLOPs of this run are unknown, so there is no MFU to explain; `flopwatch explain {place}` says why"
    if not log.provenances or log.provenances[-1].peak is None:
        return (
            "the peak FLOP/s of the device is unknown, so there is no MFU; give the dense figure of the datasheet "
            f"(`flopwatch why {place} --peak-tflops X`), or measure what the device reaches, on the machine of the run "
            f"(`{_measure(log)}`), and repeat the command"
        )
    seconds = seconds_of(log)
    if not seconds.get("wall") or "model_at_peak" not in seconds:
        return (
            "the log does not have the times that show where the peak went (time/wall_seconds and "
            "time/model_at_peak_seconds); "
            "no step was timed yet; wait for the next row"
        )
    return "the log has no step that was timed and whose FLOPs are known yet; wait for the next row"
