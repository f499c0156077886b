"""Meters of class scores."""
