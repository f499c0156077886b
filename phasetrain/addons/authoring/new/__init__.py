"""The command `phasetrain new`."""
