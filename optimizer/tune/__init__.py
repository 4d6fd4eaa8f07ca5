"""Parts of a search over recipes: the space (a recipe in which values may be choices), its check before anything runs,
the target and its figures, and the time that a search may take. The search itself is not part of this package yet.
"""
