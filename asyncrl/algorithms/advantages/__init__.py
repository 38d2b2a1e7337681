"""Advantage estimators, one per file. They run once per learner step, on the policy tokens, without gradient."""
