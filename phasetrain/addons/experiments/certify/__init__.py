"""Prove on this machine that a config resumes bit-identically (`phasetrain certify`)."""
