"""Train a run, fresh or resumed."""
