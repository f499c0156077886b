"""Meters of segmentation and detection."""
