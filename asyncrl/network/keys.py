"""Makes and reads CURVE keys as files: the secret of this side, the server that it trusts, and the clients that a
server accepts.

A folder of keys, `network.keys`, holds

- `server.secret` and `server.public`: for the machine that runs replay and learner;
- `client.secret`: for the roles on this machine;
- `allowed`: one line `KEY NAME` for each accepted client. Every handshake reads this file, so a client whose line was
  deleted cannot connect again.

A machine that runs only clients needs `client.secret` and `server.public`. A key is 40 characters of Z85. Only the
owner of a secret's file can read it.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from asyncrl.errors import ConfigError

OWN_CLIENT = "local"
KEY_BYTES = 32
CHECK_KEYS = (
    "if the server runs: is server.public in network.keys its own key, and is this client in its list `allowed`?"
)

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The keys of a listening socket: its secret, and the file with the list of accepted clients."""

    secret: bytes = field(repr=False)
    allowed: Path


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """The keys of a connecting socket: its secret, and the server that it trusts."""

    secret: bytes = field(repr=False)
    server: bytes


def server_keys(keys: str | None) -> ServerKeys | None:
    """Return the keys to listen with, from the folder `keys` (network.keys), or None without a folder. Raises
    ConfigError: a key is missing, or other users can read the secret."""
    if keys is None:
        return None
    folder = Path(keys)
    allowed_keys(folder / "allowed")
    return ServerKeys(_read_secret(folder / "server.secret"), folder / "allowed")


def client_keys(keys: str | None) -> ClientKeys | None:
    """Return the keys to connect with, from the folder `keys` (network.keys), or None without a folder. Raises
    ConfigError: a key is missing, or other users can read the secret."""
    if keys is None:
        return None
    folder = Path(keys)
    return ClientKeys(_read_secret(folder / "client.secret"), _read_key(folder / "server.public"))


def check_keys(keys: str | None) -> None:
    """Raises ConfigError: the folder `keys` (network.keys) lacks keys to listen with or keys to connect with, or other
    users can read a secret."""
    server_keys(keys)
    client_keys(keys)


def allowed_keys(path: Path) -> set[bytes]:
    """Return the public keys in a list of clients. Raises ConfigError: the list cannot be read, or a line does not
    begin with a key."""
    lines = [line.split() for line in _read(path).splitlines()]
    # A key may begin with "#" but has no space, so a comment is "#" and a space.
    return {_key(path, line[0]) for line in lines if line and line[0] != "#"}


def make_keys(folder: Path) -> None:
    """Make the keys of a server, and of the clients on its own machine. Raises ConfigError: a key exists already."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    public, secret = zmq.curve_keypair()
    _write(folder / "server.secret", secret, 0o600)
    _write(folder / "server.public", public, 0o644)
    _write(folder / "allowed", b"# the accepted clients: KEY NAME; without its line a client is refused", 0o644)
    _make_client(folder, folder, OWN_CLIENT)


def add_client(folder: Path, name: str) -> Path:
    """Make the keys of one more client, and add the client to the accepted ones. Returns the folder to copy to the
    client's machine.

    Raises ConfigError: `folder` has no keys of a server, or the name is taken or not valid.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a client: use letters, digits, '.', '_' and '-'")
    server = _read_key(folder / "server.public")
    theirs = folder / "clients" / name
    theirs.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_client(folder, theirs, name)
    _write(theirs / "server.public", server, 0o644)
    return theirs


def _make_client(folder: Path, theirs: Path, name: str) -> None:
    public, secret = zmq.curve_keypair()
    _write(theirs / "client.secret", secret, 0o600)
    allowed = folder / "allowed"
    start = "" if _read(allowed).endswith("\n") else "\n"  # an editor may have left the last line without a newline
    with allowed.open("a", encoding="ascii") as clients:
        clients.write(f"{start}{public.decode()} {name}\n")


def _write(path: Path, content: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already; keys are never overwritten: delete it, or choose another folder"
        ) from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content + b"\n")


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"network.keys: cannot read {path} ({error}); `asyncrl keys --out DIR` makes keys") from error


def _read_secret(path: Path) -> bytes:
    key = _read_key(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"network.keys: users other than its owner can read {path}; run `chmod 600 {path}`")
    return key


def _read_key(path: Path) -> bytes:
    return _key(path, _read(path))


def _key(path: Path, text: str) -> bytes:
    key = text.strip().encode()
    try:
        if len(z85.decode(key)) == KEY_BYTES:
            return key
    except (ValueError, KeyError, struct.error):
        pass
    raise ConfigError(f"network.keys: {path} holds no key; a key is 40 characters as `asyncrl keys` writes them")
