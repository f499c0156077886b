"""`phasetrain judge`: whether a change leaves a run as it is, makes it better, or worse."""
