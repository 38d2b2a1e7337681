"""Conversations as exact tokens: a model's chat template, the contents of messages, and the parsing of tool calls.

It keeps the rule that engines take tokens and return tokens (docs/concepts.md). A suffix is exactly what the template
adds, and sampled tokens are never decoded and encoded again (chat.py). Contents never become special tokens
(contents.py).

Of the promises it helps with the eighth, closed by default: it reads no file or address that the configuration does not
permit (image_sources.py), and malformed messages are refused with a reason (messages.py).

Files in reading order:

- chat.py: prompts, suffixes, turns
- template.py: the adaptation of messages to a template
- contents.py: contents as words
- parsing.py: from a turn to content and calls; formats/base.py and one file for each family of models
- chat_checks.py: the checks before a run
- from_config.py: the door

You may add a format of tool calls, with recorded renderings as its test, and adapt messages to further templates. Ask
before you change the tokens of a prompt or a suffix: stored trajectories and running episodes have them.
"""
