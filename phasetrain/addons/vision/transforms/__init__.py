"""Further transforms of images: random crops, rotations and erased rectangles."""
