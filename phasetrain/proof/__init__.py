"""Comparing the bits of two attempts of a run, step by step."""
