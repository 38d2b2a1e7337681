"""A sample of the episodes that each learner step trained, kept in the run's folder for people to read."""
