"""The learner: fetches planned batches, corrects, trains, publishes, checkpoints."""
