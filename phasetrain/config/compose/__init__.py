"""Composition of the config: layers of YAML files and overrides, merged with the origin of each
value."""
