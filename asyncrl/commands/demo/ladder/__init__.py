"""Harder tasks of the demo's family: longer expressions with brackets, and wrong turns that must be undone."""
