"""The command line: `phasetrain [COMMAND] [flags] [SECTION.key=value ...]`."""

from phasetrain.commands.cli.main import console, main

__all__ = ["console", "main"]
