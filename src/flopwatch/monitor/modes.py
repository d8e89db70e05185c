"""The four ways a run finds its FLOPs: one small protocol, one class for what they share.

All evaluate a FLOP law for every step's own shape. They differ in how the law is made and when it is checked.
"""

from typing import Any, Literal, Protocol

from torch import nn

from flopwatch.clock import Clock
from flopwatch.errors import InputError
from flopwatch.flops.law import PHASES, FlopLaw
from flopwatch.flops.passes import LossFn
from flopwatch.monitor.batch_reader import Plan, Work
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.law_book import LawBook, LawOffer, StepFlops


class FlopMode(Protocol):
    """Where a run's FLOPs come from."""

    name: str

    def knows(self, plan: Plan) -> bool:
        """Whether batches of this shape can be priced without counting; asked until it is so."""

    def learn(self, model: nn.Module, batch: Any, plan: Plan) -> None:
        """Take the time to get to know this shape."""

    def is_check_due(self, step: int) -> bool:
        """Whether this step's batch is to be counted; asked on every step."""

    def check(self, model: nn.Module, batch: Any, plan: Plan) -> str | None:
        """Why FLOPs must be counted anew, if they must: this batch is counted and compared."""

    def start_again(self, model: nn.Module, batch: Any, plan: Plan) -> None:
        """Forget what was counted, and count this batch."""

    def flops(self, work: Work) -> StepFlops | None:
        """What a micro-batch costs, None when unknown."""

    @property
    def refused(self) -> int:
        """Batches that were not counted because counting has had its share of the run's time."""

    def facts(self) -> dict[str, Any]:
        """For the provenance: method, exact, coverage, law, notes."""

    def set_frequency(self, steps: int) -> None:
        """Check every so many steps from now on; 0 is never."""

    def offer(self) -> LawOffer | None:
        """What other ranks can use of what was counted here."""

    def adopt(self, offer: LawOffer, model: nn.Module) -> None:
        """Use what another rank has counted for the same model."""


class LawMode:
    """A law per kind of batch, checked every `frequency` steps."""

    def __init__(
        self,
        name: str,
        book: LawBook,
        frequency: int,
        *,
        within_allowance: bool,
        notes: tuple[str, ...] = (),
        later: LawBook | None = None,
    ) -> None:
        self.name = name
        self._book = book
        self._later = later
        self._frequency = frequency
        self._within_allowance = within_allowance
        self._notes = notes
        self._fingerprint: int | None = None

    @property
    def refused(self) -> int:
        return self._book.refused

    def knows(self, plan: Plan) -> bool:
        return self._book.knows(plan)

    def learn(self, model: nn.Module, batch: Any, plan: Plan) -> None:
        self._fingerprint = fingerprint(model)
        self._book.learn(model, batch, plan)

    def is_check_due(self, step: int) -> bool:
        return self._frequency > 0 and step > 0 and step % self._frequency == 0

    def check(self, model: nn.Module, batch: Any, plan: Plan) -> str | None:
        if self._later is not None:
            return "FLOPs were estimated so far and are counted from here on"
        if fingerprint(model) != self._fingerprint:
            return "the model has changed (parameters, what requires a gradient, checkpointing): FLOPs counted anew"
        if self._book.check(model, batch, plan, within_allowance=self._within_allowance) is False:
            return "this batch does not cost what the FLOP law says: FLOPs counted anew"
        return None

    def start_again(self, model: nn.Module, batch: Any, plan: Plan) -> None:
        if self._later is not None:
            self._book, self._later = self._later, None
        self._book.forget()
        self.learn(model, batch, plan)

    def flops(self, work: Work) -> StepFlops | None:
        return self._book.flops(work)

    def facts(self) -> dict[str, Any]:
        laws = self._book.laws
        known = [law.coverage for law in laws if law.coverage is not None]
        return {
            "method": laws[0].method if laws else None,
            "exact": bool(laws) and all(_is_exact(law) for law in laws),
            "coverage": min(known) if known else None,
            "law": _as_text(laws[0]) if len(laws) == 1 else {},
            "notes": tuple(dict.fromkeys([*self._notes, *(note for law in laws for note in law.notes)])),
        }

    def set_frequency(self, steps: int) -> None:
        self._frequency = steps

    def offer(self) -> LawOffer | None:
        return self._book.offer()

    def adopt(self, offer: LawOffer, model: nn.Module) -> None:
        self._fingerprint = fingerprint(model)
        self._book.adopt(offer)


class NoLaw:
    """No FLOPs of our own: the user's `flops_fn` has them, or nobody."""

    refused = 0

    def __init__(self, name: str, method: Literal["flops_fn"] | None, note: str) -> None:
        self.name = name
        self._method = method
        self._note = note

    def knows(self, plan: Plan) -> bool:
        return True

    def learn(self, model: nn.Module, batch: Any, plan: Plan) -> None:
        pass

    def is_check_due(self, step: int) -> bool:
        return False

    def check(self, model: nn.Module, batch: Any, plan: Plan) -> str | None:
        return None

    def start_again(self, model: nn.Module, batch: Any, plan: Plan) -> None:
        pass

    def flops(self, work: Work) -> StepFlops | None:
        return None  # the monitor asks the user's function where the batch is at hand

    def facts(self) -> dict[str, Any]:
        return {"method": self._method, "exact": False, "coverage": None, "law": {}, "notes": (self._note,)}

    def set_frequency(self, steps: int) -> None:
        pass

    def offer(self) -> LawOffer | None:
        return None

    def adopt(self, offer: LawOffer, model: nn.Module) -> None:
        pass


def make_mode(config: MonitorConfig, clock: Clock, loss_fn: LossFn | None) -> FlopMode:
    """The mode a configuration asks for."""

    def book(method: Any) -> LawBook:
        return LawBook(clock, method=method, attention=config.attention, loss_fn=loss_fn)

    if config.mode == "estimate":
        return LawMode("estimate", book("estimate"), 0, within_allowance=True)
    if config.mode == "profiler":
        return LawMode("profiler", book("auto"), config.flops_profile_freq, within_allowance=False)
    if config.mode == "hybrid":
        reason = "mode hybrid: this version reads no hardware counters"
        if not config.fallback_to_profiler:
            raise InputError(f"{reason}, and fallback_to_profiler is off; choose another mode")
        note = f"{reason}; FLOPs are counted as in mode profiler"
        return LawMode("hybrid", book("auto"), config.flops_profile_freq, within_allowance=False, notes=(note,))
    frequency = config.recalibration_frequency if config.calibration_enabled else 0
    if config.initial_profiling:
        return LawMode("smart", book("auto"), frequency, within_allowance=True)
    return LawMode("smart", book("estimate"), frequency, within_allowance=True, later=book("auto"))


def fingerprint(model: nn.Module) -> int:
    """Changes when something that decides the cost changes; about a microsecond per parameter."""
    parameters = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    checkpointing = [getattr(module, "gradient_checkpointing", None) for module in model.modules()]
    return hash((tuple(parameters), tuple(checkpointing)))


def _is_exact(law: FlopLaw) -> bool:
    """Without a formula each shape is counted as it comes, which is as exact as the count."""
    return law.exact or (not law.coefficients and law.method != "estimate" and law.coverage in (None, 1.0))


def _as_text(law: FlopLaw) -> dict[str, dict[str, str]]:
    return {
        phase: {term: str(value) for term, value in law.coefficients[phase].items() if value}
        for phase in PHASES
        if law.coefficients
    }
