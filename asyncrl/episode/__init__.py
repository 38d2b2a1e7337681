"""One episode: a conversation between the policy and its tools, recorded as exact tokens.

Promises that this room keeps (the numbers are those of docs/concepts.md):

- 4, a failure is never a zero: an episode that fails raises, and has no trajectory (`episode.py`).
- Token in, token out: sampled tokens are never decoded and encoded again. Each one is in the loss mask exactly once,
  with its log-prob and its version (`recorder.py`).

Files in reading order: `episode.py` is the story, `tool_player.py` leads a conversation with our own tools and users,
`recorder.py` is the one builder of trajectories. `branches.py` holds their token sequences, `completions.py` reads what
was sampled, `steps.py` splits turns into steps. `images.py` places images among tokens. `group_demonstrations.py` and
`demonstrations.py` make tokens of demonstrations, for groups and for fine-tuning.

Free to change: players, and how turns are split into steps. The invariants in `recorder.py` are promises, and
`tests/episode/test_recorder.py` attacks them.
"""
