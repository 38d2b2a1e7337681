"""Corrections of the data's age, one file each: weights w on tokens, and rules that drop tokens or whole sequences."""
