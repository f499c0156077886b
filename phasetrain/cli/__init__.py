"""The command line: `phasetrain [COMMAND] [flags] [SECTION.key=value ...]`."""

from phasetrain.cli.main import console, main

__all__ = ["console", "main"]
