"""The option `--peak-tflops` of the commands that read a run's log, and the peak that they use without it."""

from dataclasses import replace

from flopwatch.cli import flag
from flopwatch.errors import InputError
from flopwatch.hardware.measured import fastest_measured
from flopwatch.records.flops import Peak
from flopwatch.records.run import Provenance, RunStart
from flopwatch.runs.given_peak import ChoosePeak, override

PEAK_TFLOPS = flag(
    "Read the log as if the run had known this dense peak of one device, in TFLOP/s, for all compute types.",
    metavar="X",
)
_MOST_TERAFLOPS = 1e6


def peak_to_use(peak_tflops: float | None) -> ChoosePeak:
    """How to choose the peak of a log: as given, as logged, or as measured on such a device after the run."""
    if peak_tflops is None:
        return _measured_if_unknown
    if not 0 < peak_tflops < _MOST_TERAFLOPS:
        raise InputError(f"--peak-tflops must be a positive number of TFLOP/s, such as 989.4, got {peak_tflops:g}")
    return override(peak_tflops * 1e12)


def _measured_if_unknown(start: RunStart | None, provenance: Provenance) -> Peak | None:
    if provenance.peak is not None or start is None or not provenance.dtypes:
        return None
    name, units = start.environment.get("device_name"), start.environment.get("device_units")
    if not isinstance(name, str) or (start.world_size > 1 and start.environment.get("device") == "cpu"):
        return None  # ranks may share the CPU, and the log does not say how many do
    peak = fastest_measured(name, units, provenance.dtypes[0])
    if peak is None:
        return None
    others = f", used for {', '.join(provenance.dtypes[1:])} too" if len(provenance.dtypes) > 1 else ""
    return replace(peak, source=f"{peak.source}; not known to the run itself{others}")
