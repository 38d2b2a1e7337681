"""Judges a program by tests with asserts: the tests run in one sandbox, the program in another that never sees them.

The two sides exchange data (values.py). The program's side (program.py) makes the calls that the judge (judge.py)
requests, so that the tests compare values and never the program's own objects. The judge trusts no answer of the
program's side: an answer can only be data, a handle to an object that stays in the program's sandbox, or an exception.
These files import nothing but the standard library.
"""
