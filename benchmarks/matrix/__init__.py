"""Runs the portable suite with many releases of torch, Python and the frameworks.

Uses the standard library only, because it runs before anything is installed.
"""
