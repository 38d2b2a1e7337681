"""Corrections of the data's age, one per file: weights on tokens, and rules that drop tokens or whole sequences."""
