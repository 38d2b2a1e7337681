"""The role that takes the place of the learner in an evaluation."""
