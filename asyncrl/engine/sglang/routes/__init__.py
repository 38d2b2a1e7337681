"""The routes of weights into an SGLang server, one file each; opening.py opens the chosen routes."""
