"""SGLang servers for the fleet."""
