"""Rules that derive values of the config from other values, section by section."""
