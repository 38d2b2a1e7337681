"""The routes of weights into an SGLang server, one file each; opening.py opens those that are chosen."""
