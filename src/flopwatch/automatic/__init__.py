"""`flopwatch run` and `flopwatch.watch`: monitor a training without changing its code."""

from flopwatch.automatic.session import WatchedProcess as WatchedProcess
from flopwatch.automatic.session import watch as watch

__all__ = ["WatchedProcess", "watch"]
