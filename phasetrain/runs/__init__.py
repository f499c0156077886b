"""The run folder: lock, status, ledger, history and report."""
