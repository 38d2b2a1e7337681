"""Process reward models, one file a family."""
