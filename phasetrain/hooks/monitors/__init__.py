"""Hooks that watch a metric: early stopping."""
