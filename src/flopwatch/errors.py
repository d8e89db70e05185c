"""The errors flopwatch raises.

FlopwatchError
├── InputError              what was passed cannot be used (also a ValueError)
│   └── UnsupportedError    this trainer cannot train this model
├── MeasurementError        counting or measuring failed
│   └── UntraceableError    the model cannot be followed with fake tensors
└── MissingDependencyError  an optional package is not installed (also an ImportError)

Each message says what happened, with the value, and what to do next.
"""


class FlopwatchError(Exception):
    """Base of everything flopwatch raises on purpose."""


class InputError(FlopwatchError, ValueError):
    """An argument, a batch or a model that cannot be used as it is."""


class UnsupportedError(InputError):
    """A trainer and a model that do not go together."""


class MeasurementError(FlopwatchError):
    """Counting or measuring was tried and failed."""


class UntraceableError(MeasurementError):
    """The model's control flow needs values that fake tensors do not have."""


class MissingDependencyError(FlopwatchError, ImportError):
    """An optional package is needed for what was asked."""
