"""Experiments and section groups that ship with phasetrain."""
