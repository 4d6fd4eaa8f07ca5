"""Passes: each rewrites weights, the runtime specification, or both."""
