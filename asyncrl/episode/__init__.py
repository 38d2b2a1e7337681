"""One episode: a conversation between the policy and its tools, recorded as exact tokens.

This package keeps these promises (the numbers are those of docs/concepts.md):

- 4, a failure is never a reward of zero: an episode that fails raises an error, and is not stored as a trajectory
  (`episode.py`).
- Token in, token out: sampled tokens are never decoded and encoded again. Each sampled token is in the loss mask
  exactly once, with its log-prob and its version (`recorder.py`).

Files in reading order: `episode.py` runs an episode, `tool_player.py` leads its conversation with asyncrl's own tools
and users, and `recorder.py` is the only builder of trajectories. `branches.py` holds the token sequences of an episode,
called branches, and `limits.py` says how many tokens they may have. `claims.py` compares an agent's account of its
episode with the record.

`repeated_calls.py` finds the tool calls that the prompt of a new branch repeats.

`completions.py` reads sampled tokens, `steps.py` splits turns into steps, and `images.py` places images among tokens.
`group_demonstrations.py` and `demonstrations.py` make tokens of demonstrations, for groups and for fine-tuning.
`from_config.py` renders the demonstrations of a run.

`recorder.py` lists invariants that always hold. `tests/episode/test_recorder.py` tries to break them.
"""
