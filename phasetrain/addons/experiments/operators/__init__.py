"""Finds the operators of a model that have no deterministic kernel."""
