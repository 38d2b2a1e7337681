"""The configuration: typed schemas, checks that name the fix, and how a role reads it from the command line."""
