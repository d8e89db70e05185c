"""Results with numbers chosen by the test, and nothing else in them."""

from dataclasses import replace
from pathlib import Path

from flopwatch.records.privacy import PrivacySpent
from flopwatch.records.trial import Measured, MemoryUse, StepCost, StepTimes, TrialResult, TrialSpec
from flopwatch.report.capture import Capture
from flopwatch.report.summary import summarise

GIB = 2**30
# Both a spec and a result have a command; here it is the result's.
_SPEC = set(TrialSpec.__dataclass_fields__) - {"command"}


def ran(trainer, batch, seq, seconds=1.0, *, spread=0.01, gib=None, flops=None, mfu=None, hfu=None, **more):
    """An `ok` trial whose median has an interval of +- spread."""
    spec_more = {name: more.pop(name) for name in list(more) if name in _SPEC}
    low, high = seconds * (1 - spread), seconds * (1 + spread)
    steps = StepTimes(10, seconds, low, high, low, high, high, seconds, spread > 0.025)
    cost = StepCost(hardware_flops=flops, mfu=mfu, hfu=hfu) if flops or mfu or hfu else None
    memory = MemoryUse(reserved_bytes=int(gib * GIB)) if gib else MemoryUse()
    measured = Measured(
        steps=steps, samples_per_s=batch / seconds, tokens_per_s=batch * seq / seconds, memory=memory, cost=cost
    )
    return ended(trainer, batch, seq, "ok", measured=measured, **spec_more, **more)


def private(trainer, batch, seq, seconds, gib, epsilon):
    """An `ok` trial of a private trainer, whose step time is unstable."""
    result = ran(trainer, batch, seq, seconds, spread=0.1, gib=gib)
    spent = PrivacySpent(epsilon, 2e-5, 0.8, batch / 50_000, 25_000, "prv")
    return replace(result, measured=replace(result.measured, privacy=spent))


def private_results():
    """Trials of private and other trainers; a line about them has a rate, a peak, an epsilon and a long verdict."""
    return [
        ran("standard", 16, 128, 0.01, gib=2),
        ran("standard", 8, 128, 0.0051, gib=1, spread=0.2),
        private("ghost", 16, 128, 0.02, 2, 0.20845),
        private("dpsgd", 8, 128, 0.0105, 1, 0.1234),
        ran("private:DPLoop", 16, 128, 0.03, gib=3),
    ]


def ended(trainer, batch, seq, outcome, *, name=None, seconds=10.0, unix_time=1000.0, **more):
    settings = {key: more.pop(key) for key in list(more) if key in _SPEC}
    spec = TrialSpec(trainer, settings.pop("model", "tiny"), batch, seq, **settings)
    name = name or f"{trainer}_bs{batch}_seq{seq}_{spec.model}_{spec.seed}"
    return TrialResult(name, "key", spec, outcome, seconds=seconds, unix_time=unix_time, **more)


def summary_of(*results, missing=()):
    named = {result.name: result for result in results}
    planned = {f"missing_{place}": spec for place, spec in enumerate(missing)}
    return summarise(Capture(Path("a-sweep"), named, planned))


def group_of(*results):
    (group,) = summary_of(*results).groups
    return group
