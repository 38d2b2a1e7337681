"""`asyncrl try`: one episode in the terminal, to try a new environment, tool or rule before a run."""
