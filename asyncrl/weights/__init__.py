"""Weights on their way from the learner to the engines: all or nothing, versions never go back."""
