"""The phase engine: the plan of a run, its position, and the loop that interleaves train and test
phases."""
