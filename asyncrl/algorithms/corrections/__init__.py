"""Corrections for the age of the data, one per file: weights on tokens, and rules that drop tokens or whole
sequences."""
