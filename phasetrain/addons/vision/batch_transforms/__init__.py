"""Mixing of the samples of a micro-batch: mixup, cutmix, and choices among them."""
