"""Golden runs: commit the digests of a short run, and check in CI that nothing has moved a bit."""
