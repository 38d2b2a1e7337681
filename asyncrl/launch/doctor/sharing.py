"""Reads the facts that concern several hosts: the folder of the runs, keys and addresses.

Each host that is examined leaves a mark, which is a file in the folder. A host that finds the mark of another host
knows that both share the folder, and compares keys, versions and clocks. The time of a mark comes from the clock of the
folder's disk.
"""

from __future__ import annotations

import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import zmq

from asyncrl.config.schema import NetworkConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.doctor.facts import AddressFact, FolderFacts, HostMark, KeyFacts
from asyncrl.machine.files import write_whole
from asyncrl.machine.owner import OWNER_FILE, owner_of
from asyncrl.machine.ports import try_port
from asyncrl.network.keys import allowed_keys, client_keys, server_keys

MARKS = ".doctor"
LATELY_S = 86400.0
CONNECT_S = 5.0


def share(folder: Path, host: str, versions: Mapping[str, str], server_key: str) -> FolderFacts:
    """Return the facts of the folder of the runs, and leave this host's mark in it."""
    path = folder / MARKS / f"{re.sub(r'[^A-Za-z0-9._-]', '_', host)}.json"
    try:
        own = HostMark(host, _skew_s(path), versions, server_key)
        write_whole(path, msgspec.json.encode(own).decode())
        others = [mark for each in sorted(path.parent.glob("*.json")) if each != path for mark in _mark(each, path)]
        return FolderFacts(
            str(folder), free=shutil.disk_usage(folder).free, kind=_file_system(folder), marks=[own, *others]
        )
    except OSError as error:
        return FolderFacts(str(folder), error=str(error))


def _skew_s(path: Path) -> float:
    """Measure this host's clock minus the clock of the disk, by writing the file `path`."""
    begun = time.time()
    write_whole(path, "")
    written = path.stat().st_mtime
    # The clocks agree if the time of the file lies between the start and the end of writing it.
    return max(begun - written, 0.0) + min(time.time() - written, 0.0)


def _mark(path: Path, own: Path) -> Iterator[HostMark]:
    """Yield the mark in a file, if its host was examined lately."""
    if own.stat().st_mtime - path.stat().st_mtime > LATELY_S:
        return
    try:
        yield msgspec.json.decode(path.read_bytes(), type=HostMark)
    except msgspec.DecodeError:
        # Another version of asyncrl wrote the mark, which still shows that the folder is shared.
        yield HostMark(path.stem, None, {})


def _file_system(folder: Path) -> str:
    whole = folder.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if whole.is_relative_to(each.mountpoint)]
    return max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else "unknown"


def key_facts(network: NetworkConfig) -> tuple[KeyFacts | None, str]:
    """Return the facts of the folder of keys, and the public key of the server that this host's clients trust."""
    if network.keys is None:
        return None, ""
    folder, errors, server, is_allowed = Path(network.keys), [], "", None
    try:
        client = client_keys(network.keys)
        assert client is not None
        server = client.server.decode()
        if (folder / "server.secret").exists():
            server_keys(network.keys)
            public = zmq.curve_public(client.secret)
            is_allowed = public in allowed_keys(folder / "allowed")
    except ConfigError as error:
        errors.append(str(error))
    return KeyFacts(str(folder), errors, is_allowed), server


def since_start_s(run: Path) -> float | None:
    """Return the seconds since the run was started, or `None` if no process runs it."""
    with suppress(FileNotFoundError):
        if owner_of(run) is not None:
            return max(0.0, time.time() - (run / OWNER_FILE).stat().st_mtime)
    return None


def address_facts(network: NetworkConfig, shards: int, since_start_s: float | None) -> list[AddressFact]:
    """Return the facts about the addresses of replay and learner. While they run, this host must reach them. Before
    they run, the ports at addresses of this host must be free, and this host must reach the other addresses.
    """
    found, is_running = [], since_start_s is not None
    for key, host, first, count in (
        ("replay_port", network.replay_address, network.replay_port, shards),
        ("weights_port", network.learner_address, network.weights_port, 1),
    ):
        for port in range(first, first + count) if first else ():
            is_here = not is_running and _is_own(host)
            error = _listening_error(host, port) if is_here else connection_error(host, port)
            found.append(AddressFact(f"network.{key}", f"{host}:{port}", is_here, error, since_start_s))
    return found


def _is_own(host: str) -> bool:
    return not _listening_error(host, 0)


def _listening_error(host: str, port: int) -> str:
    try:
        try_port(host, port)
    except OSError as error:
        return str(error)
    return ""


def connection_error(host: str, port: int, seconds: float = CONNECT_S) -> str:
    """Try to connect to an address. Return the error, or an empty text if the connection works."""
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as error:
        return str(error)
    return ""
