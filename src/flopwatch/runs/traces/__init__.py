"""Traces of torch's profiler: how one is requested, read as a stream, and divided into uses of time."""
