"""Losses that compare several views of a sample."""
