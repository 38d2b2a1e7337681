"""The program of a step of Slurm: a look at the node, or a role with its own part of the node's GPUs.

`python -m asyncrl.launch.slurm.step look ...` prints a line of JSON. `python -m asyncrl.launch.slurm.step role GPUS
COMMAND ...` becomes the command. Slurm sets CUDA_VISIBLE_DEVICES in each step, so only the step itself can change it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from asyncrl.machine.numa import GPU_VARIABLE, cpus_near_gpus, format_cpus, visible_gpus
from asyncrl.version import VERSION

ANY_PORT = 9
"""A port for a socket that sends nothing: it only shows from which address packets would be sent."""
ALL_GPUS = "all"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node of the job.

    - `name`: its name in Slurm;
    - `gpus`, `cpus`: the numbers of its GPUs and CPUs;
    - `address`: its address for other nodes;
    - `port`: the first of its free ports;
    - `sees`: the node sees the canary, a new file in the run's folder;
    - `version`: its version of asyncrl;
    - `problem`: why it has no address, else empty.
    """

    name: str
    gpus: int
    cpus: int
    address: str
    port: int
    sees: bool
    version: str
    problem: str = ""


def look(canary: Path, towards: list[str], interface: str | None, ports: int) -> NodeReport:
    """Return the report of this node. `towards` are addresses of nodes, of which one may be this node's own. Other
    nodes reach this node at the address of its network `interface`. By default this is the interface that leads to
    another node."""
    from asyncrl.machine.ports import free_ports
    from asyncrl.machine.shared_folder import sees

    address, problem = "", ""
    try:
        address = _address_of(interface) if interface else _address_towards(towards)
    except OSError as error:
        problem = str(error)
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    cpus = len(os.sched_getaffinity(0))
    return NodeReport(name, count_gpus(), cpus, address, free_ports(ports), sees(canary), VERSION, problem)


def _address_of(interface: str) -> str:
    import psutil

    interfaces = psutil.net_if_addrs()
    for each in interfaces.get(interface, ()):
        if each.family == socket.AF_INET:
            return str(each.address)
    raise OSError(f"there is no network interface {interface} with an IPv4 address; there are {', '.join(interfaces)}")


def _address_towards(others: list[str]) -> str:
    from asyncrl.network.interfaces import address_towards

    found = [address_towards(other, ANY_PORT) for other in others]
    return next((address for address in found if not address.startswith("127.")), found[0])


def count_gpus() -> int:
    """Count the GPUs of this node that the step may use."""
    if visible := os.environ.get(GPU_VARIABLE):
        return len(visible_gpus(visible))
    if given := os.environ.get("SLURM_GPUS_ON_NODE"):
        return int(given)
    import torch

    return torch.cuda.device_count()


def become(gpus: str, command: list[str]) -> None:
    """Replace this process by a role's command. `gpus` says which of the step's GPUs the role sees: "all", or their
    numbers. With numbers, the role runs on the CPUs near these GPUs."""
    if gpus != ALL_GPUS:
        numbers = [int(number) for number in gpus.split(",") if number]
        names = visible_gpus(os.environ.get(GPU_VARIABLE, ""))
        os.environ[GPU_VARIABLE] = ",".join(names[number] if names else str(number) for number in numbers)
        if near := cpus_near_gpus(os.environ):
            os.sched_setaffinity(0, near)
            sys.stderr.write(f"asyncrl: bound to the CPUs {format_cpus(near)}, which are near its GPUs\n")
            sys.stderr.flush()
    os.execvp(command[0], command)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="asyncrl.launch.slurm.step", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    looking = commands.add_parser("look")
    looking.add_argument("--canary", type=Path, required=True)
    looking.add_argument("--towards", action="append", default=[])
    looking.add_argument("--interface")
    looking.add_argument("--ports", type=int, required=True)
    role = commands.add_parser("role")
    role.add_argument("gpus")
    role.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.command == "role":
        become(given.gpus, given.words)
    report = look(given.canary, given.towards, given.interface, given.ports)
    sys.stdout.write(json.dumps(asdict(report)) + "\n")


if __name__ == "__main__":
    main()
