"""Tools that a policy may call: one file a tool."""
