"""Exporters: each writes a model as an artifact folder."""
