"""Hooks that measure where time and memory go."""
