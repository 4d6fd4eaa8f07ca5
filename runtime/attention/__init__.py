"""Attention backends of the native engine."""
