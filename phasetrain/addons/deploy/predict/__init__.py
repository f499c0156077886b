"""Predictions of a run for files (`phasetrain predict`)."""
