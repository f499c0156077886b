"""Classes and objects of Python as parts of a config."""
