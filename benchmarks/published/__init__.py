"""Compares rows of published performance tables with the FLOPs that flopwatch counts for their models."""
