"""The metrics of an actor."""

from __future__ import annotations

from asyncrl.observe.registry.metric import made_by

gauge, counter, _ = made_by("actor")

_EPISODES = (
    counter("episodes", "episodes", "episodes delivered since the start"),
    counter("truncated", "episodes", "delivered episodes that a limit ended, since the start"),
    counter("failed", "episodes", "episodes that failed since the start"),
    counter("refused", "episodes", "episodes that the replay refused, since the start"),
    counter("demonstrations", "episodes", "demonstrations delivered as members of groups since the start"),
    gauge("running", "episodes", "episodes that are running now"),
    gauge("version", "version", "the version that the engine serves"),
    counter("tokens", "tokens", "tokens sampled since the start"),
    gauge("tokens_per_s", "tokens/s", "tokens sampled a second, since the last row"),
    counter("seconds", "s", "seconds since the start"),
    counter("idle_seconds", "s", "seconds since the start in which the engine had no request"),
    gauge("idle", "share", "share of the time since the last row in which the engine had no request"),
    gauge(
        "loop_busy",
        "share",
        "share of the time since the last row in which the actor's event loop used a core; near 1, servers wait for "
        "the actor",
    ),
    gauge("episode_tokens_mean", "tokens", "mean number of tokens of an episode, prompts included, since the last row"),
    gauge("episode_tokens_max", "tokens", "most tokens of an episode, prompts included, since the last row"),
    gauge("turns_mean", "turns", "mean number of the assistant's turns in an episode, since the last row"),
    gauge("turns_max", "turns", "most turns of the assistant in an episode, since the last row"),
    gauge("wait_s", "s", "mean time that an episode waited until the engine served the version that its ticket names"),
    gauge("generate_s", "s", "mean time that an episode spent generating"),
    gauge("tools_s", "s", "mean time that an episode spent in tools"),
    gauge("user_s", "s", "mean time that an episode waited for its simulated user"),
    gauge("agent_s", "s", "mean time that an episode spent in its agent, without generating"),
    gauge("PHASE_s", "s", "mean time that an episode spent in any other phase, which PHASE names"),
)

_SURROUNDINGS = (
    counter("tool_calls", "calls", "calls of tools since the start"),
    counter("tool_refused", "calls", "calls that the tool refused, since the start"),
    counter("tool_malformed", "calls", "calls that were not well formed, since the start"),
    counter("tool_unknown", "calls", "calls of tools that do not exist, since the start"),
    gauge("mcp_sessions", "sessions", "sessions with MCP servers that are open now"),
    counter("mcp_started", "sessions", "sessions with MCP servers that began, since the start"),
    counter("mcp_start_failures", "tries", "failed attempts to start a session with an MCP server, since the start"),
    counter("mcp_lost", "sessions", "sessions with MCP servers that ended too early or took too long, since the start"),
    counter(
        "mcp_states_lost",
        "episodes",
        "episodes whose state was lost with a session of an MCP server, since the start",
    ),
    counter("mcp_errors", "calls", "calls that an MCP server answered with an error, since the start"),
    counter("mcp_unshown", "parts", "parts of results of MCP servers that the policy does not see, such as images"),
    gauge("python_open", "sessions", "sessions of the tool `python_session` that are open now"),
    gauge("python_waiting", "episodes", "episodes that wait until there is memory for their session"),
    counter("python_started", "sessions", "sessions of `python_session` that began, since the start"),
    counter(
        "python_start_failures",
        "tries",
        "failed attempts to start a session of `python_session`, since the start",
    ),
    counter(
        "python_late",
        "calls",
        "calls of `python_session` that took too long and ended their session, since the start",
    ),
    counter(
        "python_ended",
        "calls",
        "calls of `python_session` that ended their session in another way, such as a crash, since the start",
    ),
    counter(
        "python_ran_in_pause",
        "calls",
        "calls to a session that was ended because a process of it ran between two calls, since the start",
    ),
    counter("python_states_lost", "episodes", "episodes whose session ended because of this machine, since the start"),
    counter("environment_resets", "episodes", "episodes that an environment began, since the start"),
    counter("environment_errors", "calls", "calls that an environment answered with an error, since the start"),
    counter(
        "environment_failures",
        "calls",
        "failed calls of environments, since the start. A failed call ends the episode, except that a failed `reset` "
        "is tried again",
    ),
    gauge("environment_stuck", "threads", "threads with a call of an environment that took too long and still runs"),
    counter("tool_failures", "tries", "failed attempts to call a tool, since the start"),
    gauge("tool_stuck", "threads", "threads with a call of a function tool of verl that was given up and still runs"),
    gauge("threads_stuck", "threads", "threads with a call by `asyncio.to_thread` that was given up and still runs"),
    counter("interaction_responses", "responses", "responses of [simulated users](environments.md) since the start"),
    counter("interaction_ended", "responses", "responses of simulated users that ended the episode, since the start"),
    counter(
        "interaction_failures",
        "calls",
        "calls of a simulated user that raised an error, took too long or returned an invalid value, since the start",
    ),
    counter("chat_api_answered", "requests", "requests of agents that were answered, since the start"),
    counter("chat_api_refused", "requests", "requests of agents that were refused, since the start"),
    counter("chat_api_abandoned", "requests", "requests whose agent did not wait for the answer, since the start"),
    counter(
        "chat_api_branches",
        "branches",
        "token sequences of agents' episodes, since the start. An episode has several if the agent rewrote its history",
    ),
    counter(
        "chat_api_overridden",
        "requests",
        "requests whose temperature, seed, wish for one call a turn or similar settings had no effect, since the start",
    ),
    counter("chat_api_wanted_calls", "completions", "completions that had to call a tool, since the start"),
    counter("chat_api_unmet_calls", "completions", "completions that had to call a tool and did not, since the start"),
    counter("agent_programs_started", "programs", "programs of `actor.agent_command` that were started"),
    counter("agent_programs_failed", "episodes", "episodes whose program ended without an answer, since the start"),
    gauge("agent_sessions_waiting", "episodes", "episodes that no remote agent has taken yet"),
    counter("agent_sessions_started", "episodes", "episodes that remote agents took, since the start"),
    counter("agent_sessions_failed", "episodes", "episodes that remote agents gave up, since the start"),
    counter(
        "agent_sessions_silent",
        "episodes",
        "episodes whose remote agent sent no request for actor.session_timeout_s, since the start",
    ),
    counter(
        "agent_sessions_refused",
        "requests",
        "refused requests of remote agents to set a reward or to end an episode, since the start",
    ),
    counter(
        "agent_server_started",
        "episodes",
        "episodes that began at the environment server (openenv or nemo_gym), since the start",
    ),
    counter(
        "agent_server_unavailable",
        "tries",
        "attempts to begin an episode that failed because the environment server could not be reached or was full, "
        "since the start",
    ),
    counter(
        "agent_server_lost",
        "episodes",
        "episodes that failed because the environment server was lost or gave an invalid answer, since the start",
    ),
    counter(
        "agent_server_errors",
        "calls",
        "calls to which the environment server gave a refusal or an error, which the policy then read, since the start",
    ),
    gauge("agent/NAME", "", "mean of a metric that agents returned, over the episodes since the last row"),
)

_WEIGHTS = (
    counter("weights_updates", "versions", "versions that the engine took, since the start"),
    counter("weights_refused", "versions", "versions that the engine refused, since the start"),
    counter(
        "weights_fallbacks",
        "versions",
        "versions that did not arrive by the first route, but by a later one, since the start",
    ),
    counter("weights_bytes", "bytes", "bytes of weights received since the start"),
    counter(
        "weights_transfer_s",
        "s",
        "time that transfers of weights took since the start. The engine generates meanwhile",
    ),
    counter(
        "weights_switch_s",
        "s",
        "time from the end of a transfer until the engine had switched to the new weights, since the start",
    ),
    gauge(
        "canary_difference",
        "nats",
        "mean difference between the engine's and the learner's log-probs of the canary (a short fixed sequence) at "
        "the newest version. If there are several servers, it is the largest of their means "
        "([weights.md](weights.md))",
    ),
    gauge("canary_allowed", "nats", "the limit of canary_difference"),
    counter(
        "canary_failures",
        "versions",
        "versions that an engine did not serve because their canary failed, since the start",
    ),
)

_SERVERS = (
    gauge("servers", "servers", "servers that the actor has now"),
    gauge("servers_ready", "servers", "servers that take requests now"),
    gauge("servers_without_graphs", "servers", "servers that decode without CUDA graphs now"),
    gauge("servers_queued", "requests", "requests that wait in servers of the actor now"),
    gauge("scheduler_busy", "share", "share of a core that the busiest scheduler of the actor's servers takes"),
    gauge("servers_leased", "servers", "servers that are reserved for an evaluation now"),
    counter("server_faults", "faults", "faults of servers since the start"),
    counter(
        "server_hangs",
        "hangs",
        "times that a server was killed and started again because it did not answer, since the start. Only servers "
        "that the run started count ([engines.md](engines.md#guarantees))",
    ),
    counter("server_updates", "updates", "updates of the servers' weights since the start"),
    counter("segments", "segments", "requests to servers since the start"),
    counter("cut_segments", "segments", "requests to servers that were interrupted, since the start"),
    counter("lost_segments", "segments", "requests to servers that failed, since the start"),
    counter("grammar_tokens", "tokens", "tokens sampled under a grammar, since the start"),
    counter(
        "grammar_tokens_unmeasured",
        "tokens",
        "tokens sampled under a grammar for which the total probability of the allowed tokens was not recorded, since "
        "the start ([engines.md](engines.md))",
    ),
    counter("grammar_restarts", "turns", "turns under a grammar that were cut and started over, since the start"),
    counter(
        "routed_tokens",
        "tokens",
        "tokens for which servers reported the chosen experts, since the start (engine.return_routed_experts)",
    ),
    counter(
        "routed_bytes",
        "bytes",
        "bytes that the experts reported by servers take in trajectories, since the start",
    ),
    counter(
        "routed_refused",
        "segments",
        "requests since the start whose reported experts do not fit the model: their tokens are kept without experts",
    ),
    counter(
        "recomputed_tokens",
        "tokens",
        "tokens of earlier parts of an episode that a server computed again since the start, because its weights had "
        "changed or another server had computed these tokens. `tokens_per_s` does not count them",
    ),
    counter(
        "push_pauses",
        "stops",
        "stops of servers for a push of weights, since the start. A server that joins is not stopped for its first "
        "version",
    ),
    counter(
        "push_pause_s",
        "s",
        "total time for which pushes of weights stopped servers, since the start. A stop lasts from the command to "
        "stop until the server may sample again. A wait for running requests before it (weights.mode=drain) does not "
        "count",
    ),
    gauge("push_pause_last_s", "s", "the last stop of a server by a push"),
    gauge("push_pause_max_s", "s", "the longest stop of a server by a push since the start"),
    counter("gpu_periods", "periods", "with `cluster.colocated`: times that the servers got the GPUs, since the start"),
    counter(
        "gpu_release_s",
        "s",
        "with `cluster.colocated`: time from the learner's request until all servers have freed the GPUs, since the "
        "start",
    ),
    counter(
        "gpu_resume_s",
        "s",
        "with `cluster.colocated`: time from when the servers get the GPUs until the first of them is ready, since "
        "the start",
    ),
)

METRICS = (*_EPISODES, *_SURROUNDINGS, *_WEIGHTS, *_SERVERS)
