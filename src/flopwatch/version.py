"""The version of flopwatch, read by the build and by the code."""

__version__ = "0.1.0"
