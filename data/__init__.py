"""Texts that ship with llmopt: calibration and evaluation defaults."""
