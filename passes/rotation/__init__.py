"""Orthogonal changes of basis inside a decoder, and what of a decoder they touch."""
