"""Small trainings that keep state wherever Python lets them, to show that flopwatch never touches it."""

from testbeds.stateful import changing, hooks, memories, randoms, references, trainings  # noqa: F401
from testbeds.stateful.loops import LOOPS

__all__ = ["LOOPS"]
