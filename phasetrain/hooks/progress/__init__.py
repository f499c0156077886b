"""Hooks that show progress on a terminal or in a notebook."""
