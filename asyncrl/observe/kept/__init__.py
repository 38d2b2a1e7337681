"""Keeps a sample of the episodes of each learner step and evaluation in the run's folder, for people to read."""
