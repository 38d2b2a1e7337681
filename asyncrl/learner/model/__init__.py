"""The models of the learner: loaded shard by shard, divided over the ranks, and updated.

This room keeps a part of one promise: n ranks compute the same as one, however a model is divided (`sharding.py`,
`expert_ranks.py`, `tensor_ranks.py`, `optimizer.py`). It also makes the canary with which an engine checks a version
before serving it (`canary.py`).

Read `policy.py` (log-probs of packed tokens) and `critic.py`, `loading.py` (files to shards), `sharding.py` (FSDP2),
`packed_check.py` (packing changes nothing for this model), `optimizer.py` (gradients become updates), and
`activations.py` (memory against time). Mixtures of experts have `router_balance.py`, `routing_replay.py` and
`expert_ranks.py`; tensor parallelism has `tensor_ranks.py` and `tensor_slices.py`. Adapters are in `lora.py`.

A new optimizer, family of routers or way to save memory may be added freely, with a parity test in tests/learner.
Names and shapes of parameters are part of the checkpoints.
"""
