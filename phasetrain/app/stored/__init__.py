"""Commands that need a run folder alone: its config, and the trust in its code."""
