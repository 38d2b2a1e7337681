"""Starting and supervising the roles; knows command lines, not code."""
