"""A run on several hosts over ssh."""
