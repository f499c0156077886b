"""Hooks that watch a metric: early stopping and lower learning rates on a plateau."""
