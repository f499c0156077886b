"""Trainings that are a function of their config and their seed."""

__version__ = "0.1.0"
