"""Recording what the steps of a run do, and comparing the bits of two runs."""
