"""Built-in options as the tests of the config see them, so that tuning the real ones breaks no
test."""
