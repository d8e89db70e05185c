"""The errors flopwatch raises.

FlopwatchError
├── BrokenRecordError         a record in a file has a missing or wrong field (also a ValueError)
├── FolderGoneError           the folder of a sweep was deleted while its runner used it
├── InputError                an argument, a file or a model cannot be used (also a ValueError)
│   ├── NoLogError            a run has no log, or has not written it yet
│   ├── StillRunsError        an earlier attempt of a trial still runs
│   └── UnsupportedError      this trainer cannot train this model
├── MeasurementError          counting or measuring failed
│   ├── NeedsOtherRanksError  the model calls collectives and cannot run on one rank alone
│   └── UntraceableError      the model cannot run on fake tensors
│       └── NotCopyableError  the model uses an object that cannot be copied, such as a generator
├── MissingDependencyError    an optional package is not installed (also an ImportError)
├── NewerFormatError          a newer flopwatch wrote the file
└── UnreadableError           a file exists but cannot be read

Each message says what happened, which value caused it, and what to do next.
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
    """The model cannot run on fake tensors, because its control flow depends on values of tensors."""


class MissingDependencyError(FlopwatchError, ImportError):
    """An optional package that this feature needs is not installed."""
