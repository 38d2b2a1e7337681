"""The door for agents from outside: they speak the chat-completions API, and become episodes."""
