"""Builds a task and its parts from the config."""
