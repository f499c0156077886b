"""Packed models: one file with everything that predictions need (`phasetrain pack`)."""
