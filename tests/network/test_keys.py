"""Key files: who can read them, what is never overwritten, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from asyncrl.errors import ConfigError
from asyncrl.network.keys import add_client, allowed_keys, client_keys, make_keys, server_keys
from tests.helpers import status_of
from tests.network.support import client_of, server_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_clients_folder_has_its_secret_and_the_servers_public_key_for_its_owner_only(folder: Path) -> None:
    theirs = add_client(folder, "gpu7")
    assert sorted(path.name for path in theirs.iterdir()) == ["client.secret", "server.public"]
    for secret in (folder / "server.secret", folder / "client.secret", theirs / "client.secret"):
        assert mode(secret) == 0o600
    assert mode(folder) == mode(theirs) == 0o700
    with pytest.raises(ConfigError, match="asyncrl keys --out"):
        server_keys(str(theirs))


def test_the_clients_of_a_server_trust_it_and_it_accepts_them(folder: Path) -> None:
    server = server_of(folder)
    for client in map(client_of, (folder, add_client(folder, "gpu7"))):
        assert client.server == zmq.curve_public(server.secret)
        assert zmq.curve_public(client.secret) in allowed_keys(server.allowed)
        assert client.secret.decode() not in repr(client)
    assert server.secret.decode() not in repr(server)
    assert len(allowed_keys(server.allowed)) == 2


def test_without_a_folder_there_are_no_keys() -> None:
    assert server_keys(None) is None
    assert client_keys(None) is None


def test_a_secret_that_others_can_read_is_refused_with_the_fix(folder: Path) -> None:
    (folder / "client.secret").chmod(0o640)
    with pytest.raises(ConfigError, match=r"chmod 600 .*client\.secret"):
        client_keys(str(folder))


def test_keys_are_never_overwritten(folder: Path) -> None:
    before = (folder / "server.secret").read_bytes()
    with pytest.raises(ConfigError, match="never overwritten"):
        make_keys(folder)
    add_client(folder, "gpu7")
    with pytest.raises(ConfigError, match="never overwritten"):
        add_client(folder, "gpu7")
    with pytest.raises(ConfigError, match="makes keys"):
        add_client(folder / "clients", "gpu8")
    assert (folder / "server.secret").read_bytes() == before
    assert len(allowed_keys(folder / "allowed")) == 2


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a b", "a\n", "x" * 65])
def test_a_client_needs_a_name_that_is_a_file_name(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a client"):
        add_client(folder, name)


@pytest.mark.parametrize("text", ["", "short", "x" * 39, "x" * 41, "~" * 40, "#" * 40, "\u00e9" * 40])
def test_what_is_no_key_is_refused_naming_the_file(folder: Path, text: str) -> None:
    (folder / "server.public").write_text(text)
    with pytest.raises(ConfigError, match=r"server\.public"):
        client_keys(str(folder))


def test_the_list_may_be_edited_by_hand_and_nonsense_in_it_is_refused(folder: Path) -> None:
    path = folder / "allowed"
    (known,) = allowed_keys(path)
    path.write_text(f"# a remark\n\n{known.decode()} local")
    assert allowed_keys(path) == {known}
    add_client(folder, "on a line of its own".replace(" ", "-"))
    assert len(allowed_keys(path)) == 2
    path.write_text(f"{known.decode()[:-1]} local\n")
    with pytest.raises(ConfigError, match="allowed"):
        allowed_keys(path)


def test_the_command_makes_keys_and_says_what_goes_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        return (status_of("keys", "--out", tmp_path / "keys", *arguments), *capsys.readouterr())

    assert "--client NAME" in run()[1]
    assert f"copy {tmp_path / 'keys' / 'clients' / 'gpu7'}" in run("--client", "gpu7")[1]
    status, _, refusal = run()
    assert status == 2
    assert "never overwritten" in refusal
    assert "Traceback" not in refusal
