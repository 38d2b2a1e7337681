"""The tool `search`: passages of a corpus, or of a retrieval server."""
