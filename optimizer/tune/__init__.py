"""A search over recipes: a space (a recipe in which values may be choices), a target, a budget of time.

`tune.tune` is the door; docs/tune.md describes it.
"""
