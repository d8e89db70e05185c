"""The commands that read the log of a run: `watch`, `why`, `trace`, `explain`, `compare`, and `report` of a run.

They share the argument RUN_DIR and the option `--peak-tflops`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from flopwatch.cli import RUNS_FOLDER, argument, flag, flops_per_s, say
from flopwatch.errors import InputError
from flopwatch.hardware.peaks import fastest_measured
from flopwatch.present.document import Document
from flopwatch.records.flops import Peak
from flopwatch.records.run import Provenance, RunStart
from flopwatch.runs.given_peak import ChoosePeak, override
from flopwatch.runs.log_file import NoLogError, find_log, runs_below

RunDir = Annotated[
    str | None,
    argument(
        "The folder of a run, or its log file; of a folder of runs, the newest. Default: flopwatch-runs.", "[RUN_DIR]"
    ),
]


def chosen_run(run_dir: str | None) -> str:
    folder = RUNS_FOLDER if run_dir is None else run_dir
    try:
        find_log(folder)
    except NoLogError:
        below = runs_below(folder)
        if below:
            which = f"the newest of {len(below)} runs" if len(below) > 1 else "the only run"
            say(f"{below[-1]}: {which} in {folder}", dim=True, err=True)
            return str(below[-1])
        if run_dir is None:
            place = f"{Path.cwd() / RUNS_FOLDER}"
            raise InputError(f"no run was named, and there is none in {place}; name a folder") from None
    return folder


def show(document: Document) -> None:
    """Print a document. Only this loads rich, which `--help` and `--json` do without."""
    from flopwatch.present.terminal import print_document

    print_document(document)


PEAK_TFLOPS = flag(
    "Read the log as if the run had known this dense peak of one device, in TFLOP/s, for all compute types.",
    metavar="X",
)


def peak_to_use(peak_tflops: float | None) -> ChoosePeak:
    if peak_tflops is None:
        return _measured_if_unknown
    return override(flops_per_s(peak_tflops))


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
