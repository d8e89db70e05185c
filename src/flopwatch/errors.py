"""The errors flopwatch raises.

FlopwatchError
├── BrokenRecordError         a record in a file has a missing or wrong field (also a ValueError)
├── InputError                what was passed cannot be used (also a ValueError)
│   ├── NoLogError            a run has no log, or not yet
│   └── UnsupportedError      this trainer cannot train this model
├── MeasurementError          counting or measuring failed
│   ├── NeedsOtherRanksError  the model calls collectives and cannot run on one rank alone
│   ├── ReplayRefusedError    layers that looked equal were not (internal: the model is then traced in full)
│   └── UntraceableError      the model cannot be followed with fake tensors
├── MissingDependencyError    an optional package is not installed (also an ImportError)
├── NewerFormatError          a newer flopwatch wrote the file
└── UnreadableError           a file exists and cannot be read

Each message says what happened, with the value, and what to do next.
"""


class FlopwatchError(Exception):
    """Base class of every error that flopwatch raises on purpose."""


class InputError(FlopwatchError, ValueError):
    """An argument, a file, a batch or a model cannot be used."""


class UnsupportedError(InputError):
    """The trainer cannot train the model."""


class MeasurementError(FlopwatchError):
    """Counting or measuring failed."""


class UntraceableError(MeasurementError):
    """The model's control flow depends on tensor values, which fake tensors do not have."""


class MissingDependencyError(FlopwatchError, ImportError):
    """An optional package that this feature needs is not installed."""
