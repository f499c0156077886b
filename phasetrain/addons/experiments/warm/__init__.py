"""Warm starts: runs are forked from a process that has imported everything and executed nothing."""
