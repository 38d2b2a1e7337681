"""Judging a program by tests with asserts: the tests run in one process, the program in another that never sees them.

Standard library only, for both run in the sandbox. What passes between them is data (values.py): the program side
(program.py) calls what the judge (judge.py) asks for, so that the tests compare values and never the program's objects.
"""
