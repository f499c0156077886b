"""Averages of the weights (MODEL.ema, MODEL.swa)."""
