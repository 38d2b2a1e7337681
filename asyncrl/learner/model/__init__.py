"""The models of the learner: loaded shard by shard, divided over the ranks, and updated.

This package keeps its part of two promises in docs/concepts.md:

- The learner's math is exact: n ranks compute the same as one rank, however they divide a model (`sharding.py`,
  `expert_ranks.py`, `tensor_ranks.py`, `optimizer.py`). `packed_check.py` refuses a model whose results packing would
  change.
- A weight update is all or nothing: `canary.py` computes log-probs that an engine must repeat before it serves a
  version.

Files in reading order:

- `policy.py` and `critic.py`: compute log-probs and values of packed tokens. `value_head.py`: a critic's head.
- `loading.py` and `sharding.py`: read files into the shards of each rank.
- `optimizer.py`: turns gradients into updates. `muon.py` and `loss_scale.py`: Muon, and the scaling of losses for
  float16. `activations.py` and `states_on_host.py`: trade time for memory.
- `router_balance.py`, `routing_replay.py`, `expert_ranks.py`: mixtures of experts.
- `tensor_ranks.py` and `tensor_slices.py`: tensor parallelism. `lora.py`: adapters.

You may add an optimizer, or a way to save memory, with a parity test in tests/learner. Change the names and shapes of
parameters with care: a checkpoint fits only a model with the same ones.
"""
