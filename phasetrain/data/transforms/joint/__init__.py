"""Transforms of several fields of a sample with one draw: image, mask, boxes and key points."""
