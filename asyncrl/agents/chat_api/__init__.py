"""The HTTP server at which agents request completions, by the protocols of OpenAI and Anthropic."""
