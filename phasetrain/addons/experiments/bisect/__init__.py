"""Find the key changes, or the commit, that make the difference between two runs."""
