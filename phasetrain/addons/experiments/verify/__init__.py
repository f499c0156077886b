"""Verify a run: its hash chain, its files, and random parts of it by training them again."""
