"""Hundreds of architectures, each built small from its own configuration and held against counts of real steps."""
