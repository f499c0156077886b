"""The order of samples: every sampler is a pure function of seed and position."""
