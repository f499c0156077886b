"""Visit a past update of a run, look its samples up, and log numbers after the fact."""
