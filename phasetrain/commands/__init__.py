"""One module or folder per command."""
