"""Rules: plain functions that judge an episode's outcome, one file a rule."""
