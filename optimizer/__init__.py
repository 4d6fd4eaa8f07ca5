"""Recipes, registry, pipeline and everything that surrounds a run."""
