"""The engines that sample tokens for an actor: the embedded one, or a fleet of SGLang or vLLM servers.

This package keeps the engine's part of promise 9 of docs/concepts.md: a weight update is all or nothing.

- The embedded engine switches to new weights between two forward passes: embedded.py, own_weights.py.
- A server gets requests only once it has loaded a whole version. Its answers are used only once it has passed the
  canary of this version, a check of log-probs: fleet/endpoint.py, fleet/updater.py.
- A version never moves backwards: fleet/fleet.py.

A request that fails is retried at another server, and the policy's turn keeps the tokens that were sampled before:
fleet/completion.py, fleet/partial_turn.py.

Files in reading order: base.py (the protocol), scheduler.py, cache.py, passes.py and embedded.py (continuous batching
in this process), and graphed/ (the same on a GPU by CUDA graphs). Then fleet/fleet.py (many servers as one engine),
fleet/completion.py, fleet/endpoint.py, fleet/updater.py, fleet/server.py (the protocol of a server), sglang/ and vllm/.
opening.py opens an engine of any kind, and from_config.py reads the configuration. Supporting files: sampling.py (the
choice of a token), router_watch.py (the experts of a pass) and scripted.py (an engine without a model).

You may add a kind of server, a route of weights into servers (with a row in weights/routes.py), or another rule for
batching requests. Ask before you change `Engine`, or the rule that a sampled token has a log-prob and a version.
"""
