"""Show what a run will do, and check it before the first step."""
