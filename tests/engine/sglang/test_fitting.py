"""The arguments that fit a server to the requests which a run gives it."""

from __future__ import annotations

import pytest

from asyncrl.config.schema import ServerConfig
from asyncrl.engine.sglang.fitting import MOST_GRAPHS, fitting_arguments, fitting_words, requests_of_server

NEW, OLD = (0, 5, 17), (0, 5, 13)


def test_one_server_takes_all_episodes_and_some_more_requests() -> None:
    assert requests_of_server(512, 1) == 520
    assert requests_of_server(1, 1) == 16


def test_one_of_several_servers_takes_more_than_an_equal_share() -> None:
    assert requests_of_server(512, 4) == 168
    assert requests_of_server(2, 4) == 16, "never more than all episodes need"


def test_a_server_gets_graphs_for_all_requests_that_it_takes() -> None:
    expected = ["--max-running-requests", "520", "--cuda-graph-max-bs-decode", "520"]
    assert fitting_arguments(ServerConfig(), 520, NEW) == expected


def test_an_older_sglang_has_another_name_for_the_largest_graph() -> None:
    assert fitting_arguments(ServerConfig(), 16, OLD)[2:] == ["--cuda-graph-max-bs", "16"]


def test_sglang_decides_about_graphs_if_its_version_is_unknown() -> None:
    assert fitting_arguments(ServerConfig(), 16, ()) == ["--max-running-requests", "16"]


def test_graphs_have_a_largest_size() -> None:
    assert fitting_arguments(ServerConfig(), 4104, NEW)[1::2] == ["4104", str(MOST_GRAPHS)]


@pytest.mark.parametrize(
    ("own", "names"),
    [
        (["--max-running-requests", "9"], ["--cuda-graph-max-bs-decode"]),
        (["--cuda-graph-max-bs=9"], ["--max-running-requests"]),
        (["--disable-cuda-graph"], ["--max-running-requests"]),
        (["--dp-size", "2"], []),
        (["--config", "server.yaml"], []),
        (["--device", "cpu"], []),
        (["--attention-backend", "fa3"], ["--max-running-requests", "--cuda-graph-max-bs-decode"]),
    ],
)
def test_what_the_users_own_arguments_decide_is_left_out(own: list[str], names: list[str]) -> None:
    server = ServerConfig(arguments=own)
    assert fitting_arguments(server, 16, NEW)[::2] == names
    words = fitting_words(server, 8, 1)
    assert bool(words) == bool(names)
    assert ("--max-running-requests" in words, "CUDA graphs" in words) == (
        "--max-running-requests" in names,
        "--cuda-graph-max-bs-decode" in names,
    )


def test_the_words_name_the_numbers_and_the_reason() -> None:
    assert fitting_words(ServerConfig(), 512, 4) == (
        "--max-running-requests 168 and CUDA graphs of decoding up to 168, since an actor runs 512 episodes at once on "
        "4 servers"
    )
