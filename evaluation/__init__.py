"""Measures quality, speed and memory of a model."""
