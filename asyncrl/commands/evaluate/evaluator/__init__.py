"""The role `evaluator`, which an evaluation has instead of a learner."""
