"""Tokens from text (`phasetrain tokenize`)."""
