"""JSON Schema and completion of configs, for editors and shells."""
