"""One optimizer update: gradient scaling, the check for non-finite values, and sharpness-aware
steps."""
