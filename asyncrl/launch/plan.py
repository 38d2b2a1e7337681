"""`asyncrl train --plan`: prints where the processes of a run would be, and starts nothing.

`--plan` asks the hosts for their GPUs and CPUs. `--plan=16` assumes 16 hosts with `cluster.gpus` and `cluster.cpus`
each. `--plan=pools` assumes a host for each node of `cluster.pools`, with the GPUs and CPUs that the pool names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial

from asyncrl.config.load import role_main
from asyncrl.config.schema import ActorConfig, ClusterConfig, ServerConfig, TrainConfig
from asyncrl.config.schema.cluster import MOST
from asyncrl.engine.sglang.fitting import fitting_words
from asyncrl.errors import ConfigError
from asyncrl.launch.launcher import open_launcher
from asyncrl.launch.placement.actors import settle_actors
from asyncrl.launch.placement.placement import Placement, place
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.placement.table import placement_table, terminal_width
from asyncrl.launch.placement.together import settle_servers
from asyncrl.launch.preflight.algorithm import check_algorithm
from asyncrl.launch.preflight.machine import SERVERS_ON_CPU
from asyncrl.launch.preflight.paths import check_imports, named_code
from asyncrl.launch.preflight.settled import check_plan

OPTION, POOLS = "--plan", "pools"
NO_GPUS = f"no host has a GPU for the servers: set cluster.gpus=N to plan for hosts with GPUs; {SERVERS_ON_CPU}\n"


def run_or_plan(run: Callable[[TrainConfig], int | None], words: Sequence[str]) -> int:
    """Call `run` with the configuration that `words` describe, or with `--plan` only show where its processes would be.
    Return the exit status."""
    rest, option = without_option(words)
    return role_main(partial(show_plan, option=option) if option else run, rest, reads_data=not option)


def without_option(words: Sequence[str]) -> tuple[list[str], str]:
    """Split the `--plan` option off a command line. Return all other words, and the option, which is empty if there is
    none. `--plan 16` becomes `--plan=16`."""
    rest, option = list[str](), ""
    for word in words:
        if word.partition("=")[0] == OPTION:
            option = word
        elif option == OPTION and (word.isdecimal() or word == POOLS):
            option = f"{OPTION}={word}"
        else:
            rest.append(word)
    return rest, option


def show_plan(config: TrainConfig, option: str = OPTION) -> None:
    """Print the plan that the command line's `option` selects. Raises ConfigError: the plan is impossible, or `asyncrl
    train` would refuse the configuration."""
    named = named_code(config.data, config.algorithm, config.actor, config.scoring)
    # A plan needs only this code. Other code may be missing on the machine where somebody plans.
    check_imports([each for each in named if each.setting.startswith(("algorithm.", "actor.environment"))])
    check_algorithm(config)
    batch_size = config.learner.batch_size
    if option == f"{OPTION}=":
        raise ConfigError(f"{option} names no hosts: write {OPTION}=N for N hosts, or {OPTION} for those of this run")
    if assumed := option.partition("=")[2]:
        hosts = assumed_hosts(config.cluster, assumed)
        one_machine = len(hosts) == 1
        placement = place(config, hosts)
    else:
        with closing(open_launcher(config)) as launcher:
            hosts, one_machine = launcher.hosts(), launcher.is_one_machine()
            placement = place(config, hosts)
            episodes = config.actor.at_once(batch_size)
            if one_machine and settle_servers(config.engine, config.weights, config.model, episodes, placement):
                placement = place(config, hosts)
            launcher.check_addresses(placement)
    if why := settle_actors(config.actor, config.cluster, config.engine, batch_size, placement):
        placement = place(config, hosts)
    names = config.cluster.hosts
    check_plan(config, placement, one_machine)
    shown = names if len(names) == len(hosts) else ()
    sys.stdout.write(placement_table(placement, shown, terminal_width(sys.stdout)))
    cluster, engine = config.cluster, config.engine
    if why:
        sys.stdout.write(f"{why}\n")
    if engine.launches and not engine.server.on_cpu:
        lines = list(_fitting_lines(engine.server, config.actor, batch_size, placement))
        sys.stdout.writelines(lines if any(host.gpus for host in hosts) else [NO_GPUS])
    if not assumed and cluster.launcher == "local" and cluster.gpus is not None and cluster.cpus is None:
        sys.stdout.write(f"planned with this machine's {hosts[0].cpus} CPUs; for another machine set cluster.cpus\n")


def _fitting_lines(server: ServerConfig, actor: ActorConfig, batch_size: int, placement: Placement) -> Iterator[str]:
    """Yield lines that say what each server of an actor is given. What a server is given depends on the number of its
    actor's servers, so each such number has a line."""
    for servers in sorted({role.servers for role in placement.of("actor")}):
        if words := fitting_words(server, actor.at_once(batch_size), servers, actor.asks_in_parallel):
            yield f"each server is given {words}\n"
    if server.together > 1:
        yield f"{server.together} servers share each GPU (engine.server.per_gpu), each with a scheduler of its own\n"


def assumed_hosts(cluster: ClusterConfig, wanted: str) -> list[Host]:
    """Return the hosts of `--plan=wanted`. Raises ConfigError: the configuration lacks their GPUs or CPUs."""
    if wanted != POOLS:
        if not wanted.isdecimal() or not 0 < int(wanted) <= MOST:
            raise ConfigError(f"{OPTION}={wanted}: write a number of hosts, at most {MOST:,}, or pools")
        if cluster.gpus is None or cluster.cpus is None:
            raise ConfigError(f"{OPTION}={wanted}: set cluster.gpus and cluster.cpus to what each host has")
        return [Host(cluster.gpus, cluster.cpus)] * int(wanted)
    if not cluster.pools:
        raise ConfigError(f"{OPTION}=pools: cluster.pools is empty; write {OPTION}=N for N hosts")
    hosts, problems = [], []
    for name, pool in cluster.pools.items():
        gpus, cpus = pool.get("gpus", cluster.gpus), pool.get("cpus", cluster.cpus)
        if gpus is None or cpus is None:
            key = "gpus" if gpus is None else "cpus"
            problems.append(f"{OPTION}=pools: cluster.pools.{name} has no {key}; add this key, or set cluster.{key}")
        else:
            hosts += [Host(gpus, cpus)] * pool.get("nodes", 1)
    if problems:
        raise ConfigError("\n".join(problems))
    return hosts
