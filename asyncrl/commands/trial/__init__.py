"""One episode in the terminal: how a new environment, tool or rule is tried before a run."""
