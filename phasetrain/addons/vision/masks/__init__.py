"""Datasets of images with masks."""
