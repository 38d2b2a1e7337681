"""vLLM servers for the fleet."""
