"""Changes of the reward before advantages are estimated, one per file."""
