"""What is noted of a step's calls when it ends, and what it costs once its values are known."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flopwatch.monitor.calls import CallKind
from flopwatch.monitor.certificates import Certificates
from flopwatch.monitor.law_book import CallPrice, LawBook
from flopwatch.monitor.outside_calls import OutsideWork
from flopwatch.monitor.watched_step import StepCount


@dataclass(frozen=True, slots=True)
class StepCalls:
    """How the model was called in a step.

    Attributes:
        kinds: The calls, or, where none was seen, those that the given batches suggest.
        own_prices: Of calls that were counted for themselves, because values steer what they cost.
        doubt: Why the calls are not known, or not all; None when they are.
        count: What the step ran, where it was counted as it ran.
        book: The laws that held then.
        certificates: What counted steps had shown of them.
        nodes: Operations that autograd recorded in the step, and how often gradients reached the model.
        outside: Which other modules it called.
    """

    kinds: tuple[CallKind, ...] = ()
    own_prices: tuple[CallPrice | None, ...] = ()
    doubt: str | None = None
    count: StepCount | None = None
    book: LawBook | None = None
    certificates: Certificates | None = None
    nodes: tuple[int | None, int] = (None, 0)
    outside: OutsideWork = field(default_factory=OutsideWork)

    @property
    def kind(self) -> tuple[tuple[CallKind, ...], tuple[int | None, int], int | None]:
        """Steps of the same kind run the same, as far as is seen."""
        return self.kinds, self.nodes, self.outside.sized

    @property
    def pattern(self) -> tuple[object, ...]:
        """The same without sizes."""
        return tuple(kind.family for kind in self.kinds), self.nodes, self.outside.unsized


NO_CALLS = StepCalls()


@dataclass(frozen=True, slots=True)
class StepFlops:
    """What a step costs; a part that is not known is None.

    Attributes:
        model: What the mathematics needs.
        hardware: What is executed.
        recompute: The part of it that runs a second time.
        model_by_dtype: Model FLOPs by compute type; empty where that is not known.
        hardware_by_dtype: Executed FLOPs by compute type.
        reason: Why they are not exact; None when they are.
    """

    model: int
    hardware: int | None = None
    recompute: int | None = None
    model_by_dtype: Mapping[str, int] = field(default_factory=dict)
    hardware_by_dtype: Mapping[str, int] = field(default_factory=dict)
    reason: str | None = None
