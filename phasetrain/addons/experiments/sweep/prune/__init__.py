"""Pruning of a sweep: runs pause at rungs, and the best of them are resumed."""
