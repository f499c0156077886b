"""The process and its machine: device, seeds, signals, clocks, the terminal, and file
operations."""
