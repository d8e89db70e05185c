"""The version, where the build and the code both read it."""

__version__ = "0.1.0"
