"""What the hardware counters of a run have shown, read from its log: energy, and FLOP/s beside the counted ones."""

from dataclasses import dataclass
from math import isfinite

from flopwatch.language import Said, commas, semicolons
from flopwatch.numbers import energy, flop_rate, percent
from flopwatch.records.run import Number
from flopwatch.runs.comparison import total
from flopwatch.runs.reading import RunLog


@dataclass(frozen=True, slots=True)
class Counters:
    """What hardware counters have shown of a run. Unknown values are None.

    Attributes:
        source: Where the newest values come from, such as `nvml-gpm`.
        energy_joules: Of all devices since the run's first start, as far as it was measured.
        joules_per_step: At the mean power of the last session; `joules_per_token` and `joules_per_sample` too.
        flops_per_s: FLOP/s of a device by its counters in the newest window; None if they do not show it.
        counted_flops_per_s: Executed FLOPs per second of a device, as counted in the same window.
        tensor_active: Share of the cycles in which the tensor cores were busy, in the newest window.
    """

    source: str
    energy_joules: float | None = None
    joules_per_step: float | None = None
    joules_per_token: float | None = None
    joules_per_sample: float | None = None
    flops_per_s: float | None = None
    counted_flops_per_s: float | None = None
    tensor_active: float | None = None


def counters_of(log: RunLog) -> Counters | None:
    """What the counters of a run have shown; None if it has read none. `read_around` is enough."""
    row = next((row for row in reversed(log.rows) if row.counters_source is not None), None)
    joules = _possible(total(log, "total/energy_joules"))
    if row is None and joules is None:
        return None
    values = {} if row is None else row.values
    return Counters(
        "hardware counters" if row is None or row.counters_source is None else row.counters_source,
        joules,
        _possible(total(log, "perf/joules_per_step")),
        _possible(total(log, "perf/joules_per_token")),
        _possible(total(log, "perf/joules_per_sample")),
        _possible(values.get("counters/flops_per_second_per_device")),
        _possible(values.get("perf/hardware_flops_per_second_per_device")),
        _possible(values.get("counters/tensor_active")),
    )


def _possible(value: Number | None) -> Number | None:
    """The value; None if no counter can show it, as in a log with the NaN of a driver."""
    return value if value is not None and isfinite(value) and value >= 0 else None


def energy_per_work(found: Counters) -> list[str]:
    """Energy per token, sample and step, in words; without what is unknown."""
    each = [
        (found.joules_per_token, Said("{energy} per token", energy=energy(found.joules_per_token))),
        (found.joules_per_sample, Said("{energy} per sample", energy=energy(found.joules_per_sample))),
        (found.joules_per_step, Said("{energy} per step", energy=energy(found.joules_per_step))),
    ]
    return [words for joules, words in each if joules is not None]


def counter_sentences(found: Counters) -> list[str]:
    """Energy, and count against counters, in one sentence each; without what is unknown.

    >>> counter_sentences(Counters("nvml", 4.2e6, 310.0, flops_per_s=420e12, counted_flops_per_s=400e12))
    ['Measured energy of the devices: 4.20 MJ (nvml); 310 J per step.', 'FLOP/s of a device in the newest window: \
400.0 TFLOP/s counted, 420.0 TFLOP/s by its counters (nvml), 1.05 times as many.']
    """
    said: list[str] = []
    if found.energy_joules is not None:
        whole = f"{energy(found.energy_joules)} ({found.source})"
        together = semicolons([whole, commas(energy_per_work(found))])
        said.append(Said("Measured energy of the devices: {energy}.", energy=together))
    if found.flops_per_s is not None and found.counted_flops_per_s:
        times = found.flops_per_s / found.counted_flops_per_s
        said.append(
            Said(
                "FLOP/s of a device in the newest window: {counted} counted, {seen} by its counters ({source}), "
                "{times:.2f} times as many.",
                counted=flop_rate(found.counted_flops_per_s),
                seen=flop_rate(found.flops_per_s),
                source=found.source,
                times=times,
            )
        )
    elif found.tensor_active is not None:
        busy = Said("The tensor cores were busy in {share} of the cycles ({source}).")
        said.append(busy.filled(share=percent(found.tensor_active), source=found.source))
    return said
