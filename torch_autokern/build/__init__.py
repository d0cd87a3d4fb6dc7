"""Source to artifact, in a box."""
