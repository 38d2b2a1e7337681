"""Conversations as exact tokens: a model's chat template, the contents of messages, and the parsing of tool calls.

This package keeps the rule that engines take tokens and return tokens (docs/concepts.md). A suffix, the tokens between
two turns of the policy, is exactly what the template writes there. Sampled tokens are never decoded and encoded again
(chat.py). Contents never become special tokens (contents.py).

It also helps to keep promise 8, closed by default: images are read only from files and addresses that the configuration
permits (image_sources.py), and malformed messages are refused with a reason (messages.py).

Files in reading order:

- chat.py: prompts, suffixes, turns
- template.py: the adaptation of messages to a template
- contents.py: the encoding of contents without special tokens
- parsing.py: splits a turn into its content and calls, with the help of formats/base.py and of a file in formats/ for
  each family of models
- chat_checks.py: the checks before a run
- from_config.py: opens a Chat from the configuration

Supporting files:

- backend.py: texts to tokens and back; prompt_lengths.py: prompts that are too long
- history.py: a request's messages, compared with the recorded ones; image_blocks.py: the images in messages
- thoughts.py: the thoughts in a turn

The test of a new format of tool calls needs recorded renderings of the model's template. Do not change the tokens of a
prompt or a suffix without need: stored trajectories and running episodes contain them.
"""
