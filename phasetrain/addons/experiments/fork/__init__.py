"""Forks: a run that starts from a checkpoint of another run, as if it had made the same updates."""
