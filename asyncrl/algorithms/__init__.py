"""Advantages, losses, corrections, KL forms and aggregations, as pure functions on tensors.

One convention throughout: tokens are packed. N tokens of S sequences lie one after the other, `sequence` int64[N] tells
whose a token is (non-decreasing, an index into the S sequences of the global batch), and `mask` bool[N] is true on the
tokens that the policy sampled. What concerns whole sequences has shape [S] and is the same on every rank.
"""
