"""Show the plan of a run, and check it before the first step."""
