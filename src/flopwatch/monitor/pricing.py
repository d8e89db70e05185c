"""What steps cost and what that is divided by: the mode, the model and the peak of a live run."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from flopwatch.clock import Clock
from flopwatch.errors import InputError
from flopwatch.monitor.batch_reader import BatchReader, Plan, Reading, Signature, Work
from flopwatch.monitor.config import MonitorConfig
from flopwatch.monitor.denominator import compute_dtype, device_of, find_peak
from flopwatch.monitor.law_book import LawOffer, StepFlops
from flopwatch.monitor.modes import FlopMode, NoLaw, make_mode
from flopwatch.monitor.notices import Tell
from flopwatch.records import Peak
from flopwatch.run_records import Provenance


class Pricing:
    """Reads batches, counts when it must, prices steps.

    Attributes:
        model: The model that is trained; let go when the run ends.
        flops_fn: The user's own, or None.
        is_new: True when the provenance has changed since it was last written.
        peak: Of one device; None while or where it is not known.
        has_looked_for_peak: Whether it was looked up.
        apart: A context in which counting runs, so that its time is not the step's.
        waits_for_laws: True while another rank counts: nothing is counted here then.
    """

    def __init__(
        self,
        config: MonitorConfig,
        clock: Clock,
        *,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        flops_fn: Callable[[Any], int] | None,
        peak_flops_per_s: float | None,
        apart: Callable[[], Any],
        tell: Tell,
    ) -> None:
        self._config = config
        self.flops_fn = flops_fn
        self._peak_override = peak_flops_per_s or (config.peak_tflops * 1e12 if config.peak_tflops else None)
        self._apart = apart
        self._tell = tell
        self.model: nn.Module | None = None
        self._reader = BatchReader()
        self._mode = self._chosen_mode(clock, loss_fn)
        self._has_given_up = False
        self._looked_at: dict[int, Plan] = {}
        self._not_counted: dict[Signature, list[tuple[Plan, Any]]] = {}
        """While another rank counts: of each kind of batch the shortest and the longest met."""
        self._known: dict[int, Plan] = {}
        """Shapes that can be priced, by identity: asking the mode on every step costs more than the rest of it."""
        self.is_new = True
        self.waits_for_laws = False
        self.peak: Peak | None = None
        self.has_looked_for_peak = False
        self.device = torch.device("cpu")

    def set_model(self, model: nn.Module) -> None:
        self._known.clear()
        self.model = model
        self.device = device_of(model)
        self.has_looked_for_peak = False
        self.is_new = True

    def set_frequency(self, steps: int) -> None:
        self._mode.set_frequency(steps)

    def read(self, batch: Any, lengths: Sequence[int] | None) -> Reading:
        """Look at a batch; count, if nothing like it was met before."""
        reading = self._reader.read(batch, lengths)
        if id(reading.plan) in self._known:
            return reading
        if self.waits_for_laws:
            if id(reading.plan) not in self._looked_at:
                self._looked_at[id(reading.plan)] = reading.plan
                self._keep_for_later(batch, reading.plan)
                self._reader.check_values(batch, reading.plan)
                reading = self._reader.read(batch, lengths)
        elif self._mode.knows(reading.plan):
            self._known[id(reading.plan)] = reading.plan
        elif self.model is not None and not self._has_given_up:
            self._learn(batch, reading.plan)
            reading = self._reader.read(batch, lengths)  # now that the values of masks and positions were looked at
        return reading

    def look_at_held(self, reading: Reading) -> Reading | None:
        return self._reader.look_at_held(reading)

    def user_flops(self, batch: Any) -> int:
        """What the user's own function says."""
        assert self.flops_fn is not None
        flops = self.flops_fn(batch)
        if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 < flops < float("inf"):
            raise InputError(f"flops_fn must return a positive finite number of FLOPs, got {flops!r}")
        return int(flops)

    def is_check_due(self, step: int) -> bool:
        return not self.waits_for_laws and self._mode.is_check_due(step)

    def check(self, batch: Any, reading: Reading, price_what_was: Callable[[], None]) -> None:
        """Count this batch and compare with what it was priced at.

        Args:
            batch: As the model takes it.
            reading: What was read of it.
            price_what_was: Called before the prices change.
        """
        model = self.model
        if model is None or self._has_given_up:
            return
        with self._apart():
            message = self._mode.check(model, batch, reading.plan)
        if message is None:
            return
        price_what_was()
        with self._apart():
            self._known.clear()
            self._mode.start_again(model, batch, reading.plan)
        self.is_new = True
        self._tell("info", "flops_counted_anew", message)

    def flops(self, work: Work) -> StepFlops | None:
        """What a micro-batch costs; tells once when some are not known."""
        flops = None if self._has_given_up else self._mode.flops(work)
        if flops is None and self._mode.refused:
            self._tell(
                "info",
                "shapes_not_counted",
                "batches keep coming in shapes that were never counted, and counting has had its share of the time: "
                "their steps have no FLOPs (perf/counted_steps_percent); pass flops_fn=... to have them all",
            )
        return flops

    def look_for_peak(self, loss: Any) -> None:
        """Once, when the first loss is there: its graph remembers which type the matmuls ran in."""
        self.has_looked_for_peak = True
        self.is_new = True
        try:
            dtype = self._config.dtype or compute_dtype(self.model, loss, self.device)
            self.peak, why_not = find_peak(self.device, dtype, self._peak_override)
        except InputError as error:
            why_not = str(error)
        if self.peak is None:
            self._tell("warning", "peak_unknown", f"there will be no MFU. {why_not}")

    def offer(self) -> LawOffer | None:
        return None if self._has_given_up else self._mode.offer()

    def adopt(self, offer: LawOffer | None) -> None:
        """Use what the logging rank has counted; kinds of batches it has not met are counted here."""
        self.waits_for_laws = False
        self._looked_at.clear()
        met, self._not_counted = self._not_counted, {}
        if offer is not None and self.model is not None:
            self._mode.adopt(offer, self.model)
            for plan, batch in [example for examples in met.values() for example in examples]:
                if not self._mode.knows(plan) and not self._has_given_up:
                    self._learn(batch, plan)
        elif offer is None:
            self._has_given_up = self.flops_fn is None

    def _keep_for_later(self, batch: Any, plan: Plan) -> None:
        examples = [*self._not_counted.get(plan.signature, ()), (plan, batch)]
        examples.sort(key=lambda example: example[0].seq_len or 0)
        self._not_counted[plan.signature] = examples if len(examples) < 3 else [examples[0], examples[-1]]

    def provenance(self, step: int, device_count: int) -> Provenance:
        facts = self._mode.facts()
        coverage = facts["coverage"]
        if coverage is not None and coverage < 1:
            self._tell(
                "warning",
                "coverage_below_1",
                f"{100 * (1 - coverage):.3g} % of the matmul-like op calls have no formula, so MFU is a lower bound: "
                f"{'; '.join(facts['notes'])}. Add one with flopwatch.register_formula",
            )
        return Provenance(
            step,
            self._mode.name,
            facts["method"],
            facts["exact"],
            self._config.attention,
            coverage,
            facts["law"],
            None if self.peak is None else self.peak.to_json(),
            device_count,
            notes=facts["notes"],
        )

    def _chosen_mode(self, clock: Clock, loss_fn: Callable[[Any], torch.Tensor] | None) -> FlopMode:
        if self.flops_fn is not None:
            return NoLaw("flops_fn", "flops_fn", "as the user's function says; what is executed is not known")
        try:
            return make_mode(self._config, clock, loss_fn)
        except InputError as error:
            if self._config.strict:
                raise
            self._tell("error", "flops_unknown", f"there will be no FLOPs and no MFU: {error}")
            return NoLaw(self._config.mode, None, str(error))

    def _learn(self, batch: Any, plan: Plan) -> None:
        model = self.model
        if model is None:
            return
        self.is_new = True
        try:
            with self._apart():
                remark = self._reader.check_values(batch, plan)
                self._mode.learn(model, batch, plan)
            if remark:
                self._tell("warning", "positions_not_understood", remark)
        except Exception as error:  # the model's own code runs in there
            self._has_given_up = True
            self._tell(
                "warning",
                "flops_unknown",
                f"there will be no FLOPs and no MFU: {error}. Pass batch= as the model takes it, loss_fn=..., or "
                "flops_fn=... with a number of your own",
            )
            if self._config.strict:
                raise
