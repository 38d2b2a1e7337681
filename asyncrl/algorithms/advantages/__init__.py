"""Advantage estimators, one file each. All run once a learner step, on the policy tokens, without gradient."""
