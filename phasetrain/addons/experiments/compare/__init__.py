"""Two runs compared: results, settings, and the first update at which they differ."""
