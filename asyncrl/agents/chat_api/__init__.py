"""Episodes by agents from outside, which speak the chat-completions API."""
