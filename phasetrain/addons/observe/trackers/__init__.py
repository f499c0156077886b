"""Hooks that send metrics to experiment trackers."""
