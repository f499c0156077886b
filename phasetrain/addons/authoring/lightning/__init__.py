"""Conversion of configs of the lightning-hydra-template."""
