"""`asyncrl doctor`: what is wrong with a host, before a run finds out."""
