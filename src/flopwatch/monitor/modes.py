"""The four ways a run finds its FLOPs. All price calls by FLOP laws; they differ in how laws are made and checked."""

from dataclasses import dataclass
from typing import Any, Literal

from flopwatch.clock import Clock
from flopwatch.errors import InputError
from flopwatch.flops.law import PHASES, FlopLaw
from flopwatch.flops.losses import LossFn
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.law_book import LawBook


@dataclass
class FlopMode:
    """How a run finds its FLOPs.

    Attributes:
        name: `estimate`, `profiler`, `smart`, `hybrid`, or `flops_fn` where the user's function tells.
        book: The laws; None where flopwatch counts nothing.
        frequency: Steps between two checks of a law; 0 is never.
        within_allowance: Whether checks are limited to their share of the run's time.
        later: The laws that replace the first ones at the first check.
        method: What stands in the provenance where there is no book.
        notes: What a reader must know.
    """

    name: str
    book: LawBook | None
    frequency: int = 0
    within_allowance: bool = True
    later: LawBook | None = None
    method: Literal["flops_fn"] | None = None
    notes: tuple[str, ...] = ()

    def is_check_due(self, step: int) -> bool:
        return self.book is not None and self.frequency > 0 and step > 0 and step % self.frequency == 0

    def start_counting(self) -> bool:
        """From estimates to counts, if that is still to come."""
        if self.later is None:
            return False
        self.book, self.later = self.later, None
        return True

    def facts(self) -> dict[str, Any]:
        """For the provenance: method, exact, coverage, law, notes."""
        laws = self.book.laws if self.book is not None else []
        known = [law.coverage for law in laws if law.coverage is not None]
        return {
            "method": laws[0].method if laws else self.method,
            "exact": bool(laws) and all(map(_is_exact, laws)),
            "coverage": min(known) if known else None,
            "law": _as_text(laws[0]) if len(laws) == 1 else {},
            "notes": tuple(dict.fromkeys([*self.notes, *(note for law in laws for note in law.notes)])),
        }


def make_mode(config: MonitorConfig, clock: Clock, loss_fn: LossFn | None) -> FlopMode:
    """The mode a configuration asks for."""

    def book(method: Any) -> LawBook:
        return LawBook(clock, method=method, attention=config.attention, loss_fn=loss_fn)

    if config.mode == "estimate":
        return FlopMode("estimate", book("estimate"))
    if config.mode == "profiler":
        return FlopMode("profiler", book("auto"), config.flops_profile_freq, within_allowance=False)
    if config.mode == "hybrid":
        reason = "mode hybrid: this version reads no hardware counters"
        if not config.fallback_to_profiler:
            raise InputError(f"{reason}, and fallback_to_profiler is off; choose another mode")
        note = f"{reason}; FLOPs are counted as in mode profiler"
        return FlopMode("hybrid", book("auto"), config.flops_profile_freq, within_allowance=False, notes=(note,))
    frequency = config.recalibration_frequency if config.calibration_enabled else 0
    if config.initial_profiling:
        return FlopMode("smart", book("auto"), frequency)
    return FlopMode("smart", book("estimate"), frequency, later=book("auto"))


def _is_exact(law: FlopLaw) -> bool:
    """Without a formula each shape is counted as it comes, which is as exact as the count."""
    is_counted = not law.coefficients and law.method != "estimate" and law.coverage in (None, 1.0)
    return law.exact or (is_counted and not law.per_batch and not law.doubts)


def _as_text(law: FlopLaw) -> dict[str, dict[str, str]]:
    return {
        phase: {term: str(value) for term, value in law.coefficients[phase].items() if value}
        for phase in PHASES
        if law.coefficients
    }
