"""The HTTP server from which agents request completions, by the protocols of OpenAI and Anthropic."""
