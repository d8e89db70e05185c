"""Results with numbers chosen by the test, and nothing else in them."""

from pathlib import Path

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


def ended(trainer, batch, seq, outcome, *, name=None, seconds=10.0, unix_time=1000.0, **more):
    settings = {key: more.pop(key) for key in list(more) if key in _SPEC}
    spec = TrialSpec(trainer, settings.pop("model", "tiny"), batch, seq, **settings)
    name = name or f"{trainer}_bs{batch}_seq{seq}_{spec.model}_{spec.seed}"
    return TrialResult(name, "key", spec, outcome, seconds=seconds, unix_time=unix_time, **more)


def summary_of(*results, missing=(), preflight=()):
    named = {result.name: result for result in results}
    planned = {f"missing_{place}": spec for place, spec in enumerate(missing)}
    return summarise(Capture(Path("a-sweep"), named, planned, preflight=tuple(preflight)))


def group_of(*results):
    (group,) = summary_of(*results).groups
    return group
