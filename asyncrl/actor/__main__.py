"""`python -m asyncrl.actor`: run episodes on one engine until SIGTERM or Ctrl-C."""
