"""Monitors for Hugging Face, Accelerate, Lightning and Fabric."""
