"""List, follow and compare runs."""
