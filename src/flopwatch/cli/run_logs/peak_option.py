"""The option `--peak-tflops` of the commands that read a run's log, and the peak that they use without it."""

from typing import TYPE_CHECKING

from flopwatch.cli import flag
from flopwatch.errors import InputError

if TYPE_CHECKING:
    from flopwatch.runs.given_peak import ChoosePeak

PEAK_TFLOPS = flag(
    "Read the log as if the run had known this dense peak of one device, in TFLOP/s, for all compute types.",
    metavar="X",
)


def peak_to_use(peak_tflops: float | None) -> "ChoosePeak | None":
    """How to choose the peak of a log: as given; otherwise None, which leaves it as it was logged."""
    if peak_tflops is None:
        return None
    from flopwatch.runs.given_peak import override

    if not 0 < peak_tflops < _MOST_TERAFLOPS:
        raise InputError(f"--peak-tflops must be a positive number of TFLOP/s, such as 989.4, got {peak_tflops:g}")
    return override(peak_tflops * 1e12)


_MOST_TERAFLOPS = 1e6
