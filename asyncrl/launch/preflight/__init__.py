"""The checks of a start, and the files that a start prepares, all before any process starts: a refusal is cheap here.

`preflight.py` has the list of all checks; each other file has the checks of one topic, which take sections of the
configuration.
"""
