"""The checks of `asyncrl train`, and the files that it prepares, before it starts any process. A run that is refused
here has cost little.

`preflight.py` has the list of all checks, and `row_checks.py` the part of it that reads all rows. Each other file has
the checks of one topic, which take sections of the configuration. The user's own code runs in a child process:
`trial.py` is the starter's side, and `trying.py` the program. Before that, `importing.py` imports the user's modules in
a child process.
"""
