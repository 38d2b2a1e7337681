"""What a configuration must satisfy beyond its types: each option's constraint, and the combinations of options.

One function a section finds the combinations that begin with its keys. Every refusal names the keys with their values,
and the fix.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator
from operator import attrgetter
from pathlib import Path
from urllib.parse import urlsplit

from asyncrl.config.bind import CHAT_API_FIX, GROUP_FIX, HOSTS_FIX, KEYS_FIX, SERVER_GROUP_FIX, is_loopback
from asyncrl.config.keys import sections
from asyncrl.config.option import as_yaml, options
from asyncrl.config.schema import TrainConfig
from asyncrl.config.schema.cluster import POOL_KEYS, ROLES
from asyncrl.config.schema.scoring import configured

VLLM_COLDEST = 0.01
"""vLLM replaces lower temperatures above 0 by this one, without an error."""


DEVICE = re.compile(r"cpu|auto|cuda(:\d+)?")


def refusals(config: TrainConfig, known_bad: Collection[str] = ()) -> list[str]:
    """One line for each value or combination that cannot be.

    `known_bad` are keys that were refused already. Combinations with these keys, or with values that break their own
    constraint, are not judged.
    """
    config, bad, lines = copy.deepcopy(config), set(known_bad), []
    for prefix, section in sections(config):
        for option in options(type(section)):
            key, given = prefix + option.name, getattr(section, option.name)
            if key not in bad and not option.allows(given):
                lines.append(f"{key}={as_yaml(given)}: it must be {option.allowed}")
                bad.add(key)
            if key in bad:
                setattr(section, option.name, option.default)
    for conflict in conflicts(config):
        keys, _, fix = conflict.partition(": ")
        if bad.isdisjoint(keys.split()):
            lines.append(f"{' with '.join(f'{key}={as_yaml(attrgetter(key)(config))}' for key in keys.split())}: {fix}")
    return lines


def missing_data(config: TrainConfig) -> dict[str, str]:
    """For the key of tasks of which a file does not exist, the line that refuses it."""
    sources = {"data.train": config.data.train, "data.eval": config.data.eval or []}
    return {
        key: f"{key}={source}: there is no such file; see docs/data.md"
        for key, named in sources.items()
        for source in named
        if not may_exist(source)
    }


def may_exist(source: str) -> bool:
    """Whether a file, folder or pattern is there; what is on a hub is not looked for."""
    path = Path(source)
    return (
        source.startswith("hf://") or path.exists() or any(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    )


def conflicts(config: TrainConfig) -> Iterator[str]:
    """Every combination that cannot work, as `KEY [KEY ...]: FIX`, where the first key is the one to change.

    Each value must meet its own constraint.
    """
    for section in (_run, _data, _actor, _engine, _weights, _replay, _learner, _scoring, _cluster, _network):
        yield from section(config)


def _run(config: TrainConfig) -> Iterator[str]:
    if Path(config.run.name).name != config.run.name or config.run.name == "..":
        yield "run.name: it is the name of a folder within run.dir; use a name without slashes, other than . and .."


def _data(config: TrainConfig) -> Iterator[str]:
    data = config.data
    for key, sources in (("data.train", data.train), ("data.eval", data.eval)):
        if sources == []:
            yield f"{key}: name a file of tasks, or several"
    if data.dataset_params and data.dataset is None:
        yield "data.dataset_params data.dataset: there is no class that takes them; name it"
    yield from _prompts(config)
    if len(data.band) not in (0, 2) or sorted(data.band) != list(data.band):
        yield "data.band: give the lowest and the highest success rate, such as [0.1,0.9]"


def _prompts(config: TrainConfig) -> Iterator[str]:
    data, actor = config.data, config.actor
    if data.max_prompt_length is None:
        if data.filter_overlong or data.truncation != "error":
            key = "filter_overlong" if data.filter_overlong else "truncation"
            yield f"data.{key} data.max_prompt_length: there is no limit; set the second, or leave out the first"
        return
    if actor.agent is not None:
        yield "data.max_prompt_length actor.agent: an agent makes its prompts itself; set null"
    if data.max_prompt_length >= actor.max_tokens:
        yield "data.max_prompt_length actor.max_tokens: an answer needs room behind the prompt; lower the first one"
    if data.truncation != "error" and actor.history == "template":
        yield "data.truncation actor.history: the template would render the whole prompt again; use sampled"


def _actor(config: TrainConfig) -> Iterator[str]:
    actor = config.actor
    several = actor.agent is not None or actor.history == "template"
    if several and actor.max_total_tokens < actor.max_tokens:
        yield "actor.max_total_tokens actor.max_tokens: sequences must fit into an episode; raise the first one"
    if actor.step_split not in ("turn", "paragraph", "line") and "." not in actor.step_split:
        yield "actor.step_split: use turn, paragraph or line, or the dotted path of a function"
    if not is_loopback(actor.chat_api_host) and not config.network.insecure:
        yield f"actor.chat_api_host: other machines can reach this address: {CHAT_API_FIX}"


def _engine(config: TrainConfig) -> Iterator[str]:
    engine, actor = config.engine, config.actor
    if engine.kind == "embedded":
        if actor.max_tokens > engine.max_length:
            yield "actor.max_tokens engine.max_length: an episode must fit into a slot; lower the first key"
        return
    sources = {
        "engine.urls": bool(engine.urls),
        "engine.urls_file": engine.urls_file is not None,
        "engine.router": engine.router is not None,
        "engine.launch": engine.launches,
    }
    if sum(sources.values()) != 1:
        given = [key for key, is_set in sources.items() if is_set]
        yield f"{' '.join(['engine.kind', *given])}: the engine needs servers: set exactly one of {', '.join(sources)}"
    for key, urls in (("engine.urls", engine.urls), ("engine.router", [engine.router] if engine.router else [])):
        if not all(url.startswith(("http://", "https://")) for url in urls):
            yield f"{key}: the url of a server must begin with http:// or https://"
    if engine.launch and engine.kind != "sglang":
        yield "engine.launch engine.kind: it starts SGLang servers only; start others yourself and set engine.urls"
    if (config.cluster.actors or 1) > 1 and not engine.launches:
        yield "cluster.actors engine.kind: a server has one actor; name more servers in engine.urls instead"
    if engine.kind == "vllm" and actor.temperature < VLLM_COLDEST:
        yield f"actor.temperature engine.kind: vLLM samples at {VLLM_COLDEST} or more; set that or more"


def _weights(config: TrainConfig) -> Iterator[str]:
    weights, engine, network = config.weights, config.engine, config.network
    if weights.channel == "distributed" and not is_loopback(network.learner_address) and not network.insecure:
        key = _key(network.learner_host, "learner")
        yield f"weights.channel {key}: other machines can reach this address: {GROUP_FIX}"
    if engine.kind == "vllm" and weights.into_servers not in ("auto", "disk"):
        yield "weights.into_servers engine.kind: vLLM takes weights from a folder only; use auto"
    away = not all(is_loopback(urlsplit(url).hostname or "") for url in engine.urls)
    if weights.into_servers in ("nccl", "gloo") and away and not network.insecure:
        yield f"weights.into_servers engine.urls: other machines can reach a server's address: {SERVER_GROUP_FIX}"


def _replay(config: TrainConfig) -> Iterator[str]:
    replay, groups = config.replay, config.learner.batch_size // config.learner.group_size
    if replay.shards > groups:
        yield f"replay.shards learner.batch_size learner.group_size: a shard needs a group; use at most {groups} shards"
    if replay.shard >= replay.shards:
        yield f"replay.shard replay.shards: shards are numbered from 0 to {replay.shards - 1}"
    lowest, highest = replay.filter.min_reward, replay.filter.max_reward
    if lowest is not None and highest is not None and lowest > highest:
        yield "replay.filter.min_reward replay.filter.max_reward: every group would be refused; lower the first one"
    if replay.source is not None and not Path(replay.source).is_dir():
        yield "replay.source: name the replay folder of a finished run, such as runs/NAME/replay"


def _learner(config: TrainConfig) -> Iterator[str]:
    learner = config.learner
    batch, group, publish = learner.batch_size, learner.group_size, learner.publish_every
    if batch % group:
        multiple = -(-batch // group) * group
        yield f"learner.batch_size learner.group_size: groups are whole; use a multiple of {group}, such as {multiple}"
    if batch % learner.minibatches:
        yield "learner.minibatches learner.batch_size: the first must divide the second"
    yield from _epochs(config)
    # The steps of epochs are not known before a start has seen the data; it checks them then.
    steps = 0 if learner.epochs is not None else learner.total_steps
    if steps % publish:
        yield "learner.steps learner.publish_every: the last weights must be published; use a multiple of the second"
    if learner.checkpoint_every % publish:
        yield "learner.checkpoint_every learner.publish_every: checkpoints are versions; use a multiple of the second"
    if learner.shared_prefixes and config.model.attention in ("flash_attention_2", "flex_attention"):
        yield "learner.shared_prefixes model.attention: this attention reads whole sequences only; use null"
    yield from _hosts(config)
    ranks = learner.nodes * config.cluster.ranks
    if config.cluster.learner_ranks is not None and ranks % learner.replicas:
        yield f"learner.replicas cluster.learner_ranks: copies have equal shares of the ranks; use a divisor of {ranks}"
    if learner.deterministic and config.model.attention == "flex_attention":
        yield "learner.deterministic model.attention: flex attention is not known to repeat bit for bit; use auto"
    if learner.optimizer_on_host and learner.optimizer == "adamw_8bit":
        yield "learner.optimizer_on_host learner.optimizer: moments of 8 bits stay on the GPU; use adamw or muon"
    if len(learner.betas) != 2:
        yield "learner.betas: AdamW takes two, such as [0.9,0.99]"
    # Without training, as in an evaluation, there is nothing to warm up and no step to record.
    if 0 < steps < learner.warmup_steps:
        yield "learner.warmup_steps learner.steps: the run would end before its full learning rate; lower the first one"
    for key in ("profile_steps", "memory_steps"):
        if 0 < steps <= max(getattr(config.observe, key), default=0):
            yield f"observe.{key} learner.steps: the run has steps 0 to {steps - 1}; name some of these"
    if learner.lr_floor and learner.schedule == "constant":
        yield "learner.lr_floor learner.schedule: a constant learning rate has no floor; use linear or cosine"
    if learner.eval_every and config.data.eval is None:
        yield "learner.eval_every data.eval: evaluation needs data.eval, a file of held-out tasks"
    if learner.keep_best and (not learner.eval_every or learner.eval_every % learner.checkpoint_every):
        yield (
            "learner.keep_best learner.eval_every: each evaluation must have a checkpoint of its step to rate; set "
            f"learner.eval_every to a multiple of learner.checkpoint_every={learner.checkpoint_every}"
        )
    if config.implicit.train and config.algorithm.advantage.name != "prime":
        yield "implicit.train algorithm.advantage.name: only the advantage prime reads this model; use algorithm=prime"


def _epochs(config: TrainConfig) -> Iterator[str]:
    if config.learner.epochs is None:
        return
    if config.learner.steps is not None:
        yield "learner.epochs learner.steps: the steps follow from the epochs; set one of the two to null"
    if config.data.weights:
        yield "learner.epochs data.weights: sources with weights pass at different speeds; set learner.steps"
    if config.data.band:
        yield "learner.epochs data.band: tasks outside the band are passed over; set learner.steps"
    if config.replay.source is not None:
        yield "learner.epochs replay.source: the stored run has so many steps; set learner.steps"
    if config.learner.nodes > 1 and config.cluster.launcher == "local":
        yield "learner.epochs learner.nodes: the other hosts do not count the tasks; set learner.steps"


def _hosts(config: TrainConfig) -> Iterator[str]:
    learner, network = config.learner, config.network
    if learner.node >= learner.nodes:
        yield f"learner.node learner.nodes: hosts are numbered from 0 to {learner.nodes - 1}"
    if learner.nodes == 1:
        if learner.rendezvous is not None:
            yield "learner.rendezvous learner.nodes: one host meets no other; set learner.nodes to the number of hosts"
        if learner.interface is not None:
            yield "learner.interface learner.nodes: one host meets no other; leave the first at null, or set the second"
        return
    host, _, port = (learner.rendezvous or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        yield "learner.rendezvous learner.nodes: name an address of host 0 and a free port there, such as 10.0.0.1:5757"
    elif not is_loopback(host) and not network.insecure:
        yield f"learner.rendezvous: the learner is on {learner.nodes} hosts, and {HOSTS_FIX}"
    elif not network.replay_port:
        yield "network.replay_port learner.nodes: the other hosts must know the port; name one"
    elif not is_loopback(host) and is_loopback(network.replay_address):
        yield (
            f"{_key(network.replay_host, 'replay')} learner.rendezvous: other hosts must reach the replay; set an "
            "address of host 0"
        )


def _scoring(config: TrainConfig) -> Iterator[str]:
    scoring, kinds = config.scoring, configured(config.scoring)
    if scoring.timeout_s >= scoring.stall_s:
        yield "scoring.timeout_s scoring.stall_s: the scorer would count as hung; make the first the smaller one"
    for source, needed in scoring.needs.items():
        if not needed or not set(needed) <= set(kinds):
            yield f"scoring.needs: {source} must name some of the kinds that are configured: {', '.join(kinds)}"
        if scoring.shadow and "rules" not in needed:
            yield f"scoring.shadow scoring.needs: nothing would be left to train {source} on: let it need rules"
    if not set(scoring.serve) <= set(kinds):
        yield f"scoring.serve: name some of the kinds that are configured: {', '.join(kinds)}"
    for key, model in (("scoring.prm", scoring.prm), ("scoring.outcome_model", scoring.outcome_model)):
        if not DEVICE.fullmatch(model.device):
            yield f"{key}.device: use cpu, cuda, cuda:N (a GPU's number), or auto"
    yield from _shaping(config)


def _shaping(config: TrainConfig) -> Iterator[str]:
    scoring, shaping = config.scoring, config.scoring.shaping
    for key, model in (("scoring.prm", scoring.prm), ("scoring.outcome_model", scoring.outcome_model)):
        if model.params and not model.is_configured:
            yield f"{key}.params {key}.path: there is no model that takes them; name its folder, hub name or URL"
    if shaping.process_weight and not scoring.prm.is_configured:
        yield "scoring.shaping.process_weight scoring.prm.path: name a process reward model, which gives step scores"
    if scoring.shadow and not (shaping.outcome_weight or shaping.environment_weight or shaping.prm_acc_bonus_weight):
        yield "scoring.shadow scoring.shaping.outcome_weight: nothing is left to train on; give the outcome a weight"
    yield from _weightless(config)
    if shaping.use_logit_tanh and shaping.prm_aggregation == "product":
        yield "scoring.shaping.prm_aggregation scoring.shaping.use_logit_tanh: a product needs scores above 0; use min"
    if shaping.prm_aggregation == "best_of_n" and all(part.name != "best_of_n" for part in config.algorithm.reward):
        yield "scoring.shaping.prm_aggregation: add {name: best_of_n} to algorithm.reward, which compares the members"
    if shaping.overlong_penalty and shaping.overlong_buffer > shaping.overlong_max_length:
        yield "scoring.shaping.overlong_max_length scoring.shaping.overlong_buffer: the first must be the larger one"
    try:
        re.compile(shaping.answer_pattern)
    except re.error as error:
        yield f"scoring.shaping.answer_pattern: Python cannot read this regular expression: {error}"


def _weightless(config: TrainConfig) -> Iterator[str]:
    """Data sources whose reward would always be zero."""
    scoring, shaping = config.scoring, config.scoring.shaping
    counts = {
        "rules": shaping.outcome_weight or shaping.prm_acc_bonus_weight,
        "outcome_model": shaping.outcome_model_weight,
        "prm": shaping.process_weight or shaping.prm_aggregation == "per_step",
    }
    for source, kinds in {"any source": configured(scoring), **scoring.needs}.items():
        if not shaping.environment_weight and not any(counts[kind] for kind in kinds):
            yield (
                f"scoring.shaping.outcome_weight: nothing that {source} needs ({', '.join(kinds)}) has a weight in the "
                "reward: give it one, or use prm_aggregation=per_step and an algorithm that reads the steps"
            )


def _cluster(config: TrainConfig) -> Iterator[str]:
    cluster = config.cluster
    pools, roles = cluster.pools, cluster.roles
    if (cluster.launcher == "hosts") != bool(cluster.hosts):
        yield "cluster.hosts cluster.launcher: name hosts together with cluster.launcher=hosts; set both or none"
    if twice := sorted({name for name in cluster.hosts if cluster.hosts.count(name) > 1}):
        yield f"cluster.hosts: {', '.join(twice)} would give its GPUs twice; name each host once"
    if unreachable := [name for name in cluster.hosts if not name.strip() or name.startswith("-")]:
        yield f"cluster.hosts: {', '.join(map(repr, unreachable))} names no host; leave it out"
    for name, bounds in (("actors", cluster.autoscale.actors), ("scorers", cluster.autoscale.scorers)):
        if bounds and (len(bounds) != 2 or bounds[0] > bounds[1]):
            yield f"cluster.autoscale.{name}: name the least and the most, such as [1, 8]"
    for name, pool in pools.items():
        if unknown := sorted(pool.keys() - set(POOL_KEYS)):
            yield f"cluster.pools: {name} has no {unknown[0]}; use {', '.join(POOL_KEYS)}"
        if 0 in (pool.get("nodes"), pool.get("cpus")):
            yield f"cluster.pools: {name} needs a node and a CPU at least"
    for role, name in roles.items():
        if role not in ROLES:
            yield f"cluster.roles: there is no role {role}; use {', '.join(ROLES)}"
        if name not in pools:
            known = f"use {', '.join(pools)}" if pools else "cluster.pools is empty"
            yield f"cluster.roles: {role} is in {name}, and there is no such pool; {known}"
    if cluster.colocated:
        yield from _colocated(config)
    inhabited = {config.cluster.pool_of(role) for role in ROLES} if pools else set()
    for name in [each for each in pools if each not in inhabited]:
        yield f"cluster.pools: nothing is in {name}; name a role of it in cluster.roles, such as {{actor: {name}}}"


def _colocated(config: TrainConfig) -> Iterator[str]:
    """What keeps learner and servers from having the same GPUs in turns."""
    cluster, engine = config.cluster, config.engine
    if engine.kind == "embedded":
        yield (
            "engine.kind cluster.colocated: an embedded engine cannot free its memory; use sglang, or set "
            "cluster.colocated=false and replay.max_lag=0 for synchronous training"
        )
    elif not engine.launches:
        yield "engine.launch cluster.colocated: the run must start the servers; use true, and name no servers"
    if config.replay.max_lag != 0:
        yield "replay.max_lag cluster.colocated: nothing is sampled while the learner trains; set 0"
    if config.replay.source is not None:
        yield "cluster.colocated replay.source: no server samples anything then; set false"
    if config.weights.channel == "distributed":
        yield "weights.channel cluster.colocated: learner and actor have no GPU at the same time; use auto"
    if config.weights.into_servers == "nccl":
        yield "weights.into_servers cluster.colocated: NCCL needs a GPU without a server; use auto"
    if config.learner.nodes > 1:
        yield "learner.nodes cluster.colocated: learner and servers must be on one host; set 1"
    if cluster.pools and cluster.pool_of("actor") != cluster.pool_of("learner"):
        yield "cluster.roles cluster.colocated: learner and servers have the same GPUs; put both into one pool"


def _key(own_host: str | None, role: str) -> str:
    """The key that says where a role listens."""
    return "network.host" if own_host is None else f"network.{role}_host"


def _network(config: TrainConfig) -> Iterator[str]:
    network = config.network
    addresses = {
        _key(network.replay_host, "replay"): network.replay_address,
        _key(network.learner_host, "learner"): network.learner_address,
    }
    makes_keys = config.cluster.launcher != "local"
    for key, address in addresses.items():
        if not is_loopback(address) and network.keys is None and not (network.insecure or makes_keys):
            yield f"{key}: other machines can reach this address: {KEYS_FIX}"
    first, shards, weights = network.replay_port, config.replay.shards, network.weights_port
    together = network.replay_address == network.learner_address
    if together and first and weights in range(first, first + shards):
        yield "network.weights_port network.replay_port: the replay listens there; name another port"
    if first + shards > 65536:
        yield "network.replay_port replay.shards: each shard takes the next port, up to 65535; lower the first one"
