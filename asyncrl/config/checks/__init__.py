"""The combinations of options that cannot work.

`conflicts.py` collects those of all sections. Each other file finds the ones that begin with the keys of a section or
of a topic. A check gets the sections and values that it compares, and yields `KEY [KEY ...]: FIX`. The first key is
the one to change.

`config/refusals.py` adds the values, so that a refusal names the keys, their values, and the fix.
"""
