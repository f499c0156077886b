"""Traces of the steps of a run, and comparisons of the bits of two runs."""
