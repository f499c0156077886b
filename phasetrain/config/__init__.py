"""Composition, checks and derivation of the config (section RUN and everything below the root)."""
