"""The ways in which weights get into an SGLang server, one file each."""
