"""Converters from the configs of other frameworks."""
