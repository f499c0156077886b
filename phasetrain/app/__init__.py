"""The basis of commands and add-ons: resolve a config, plan, train, resume, test and load a run."""
