"""How families of models write tool calls, one file a family."""
