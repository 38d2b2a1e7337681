"""The arguments that fit a server to the requests which a run gives it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from asyncrl.config.schema import ServerConfig
from asyncrl.engine.sglang.fitting import (
    MOST_GRAPHS,
    SERVER_BYTES,
    GpuMemory,
    cache_tokens,
    fitting_arguments,
    fitting_words,
    requests_of_server,
    servers_together,
    together_arguments,
    token_bytes,
)
from asyncrl.errors import ConfigError

H200, H100, SMALL_GPU = 141 * 10**9, 80 * 10**9, 24 * 10**9
SMALL_MODEL = 270 * 10**6
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


def test_an_agent_may_send_more_requests_than_it_has_episodes_so_its_servers_have_no_limit() -> None:
    assert requests_of_server(64, 1, parallel=True) == 136
    assert requests_of_server(2, 4, parallel=True) == 16
    assert fitting_arguments(ServerConfig(), 136, NEW, parallel=True) == ["--cuda-graph-max-bs-decode", "136"]
    assert fitting_arguments(ServerConfig(arguments=["--disable-cuda-graph"]), 136, NEW, parallel=True) == []
    assert fitting_words(ServerConfig(), 64, 1, parallel=True) == (
        "CUDA graphs of decoding up to 136, since an actor runs 64 episodes at once on one server, and its agent may "
        "request several turns of an episode at once (2 are assumed)"
    )


@pytest.mark.parametrize(
    ("weights", "episodes", "cpus", "gpu", "expected"),
    [
        (SMALL_MODEL, 512, 16, H200, 4),
        (SMALL_MODEL, 4096, 64, H200, 4),
        (SMALL_MODEL, 256, 16, H200, 2),
        (SMALL_MODEL, 64, 16, H200, 1),
        (SMALL_MODEL, 512, 5, H200, 2),
        (SMALL_MODEL, 512, 0, H200, 1),
        (SMALL_MODEL, 512, 16, H100, 2),
        (SMALL_MODEL, 512, 16, SMALL_GPU, 1),
        (8 * 10**9, 512, 16, H200, 1),
    ],
)
def test_several_servers_share_a_gpu_only_where_that_helps(
    weights: int, episodes: int, cpus: int, gpu: int, expected: int
) -> None:
    assert servers_together(weights, episodes, cpus, gpu) == expected


def test_servers_on_one_gpu_divide_the_room_for_their_caches() -> None:
    memory = GpuMemory(H200, SMALL_MODEL, token=23_040)
    assert cache_tokens(memory, 0.85, 4, wanted=250_000, longest=4096) == 250_000
    room = cache_tokens(memory, 0.85, 4, wanted=10**9, longest=4096)
    assert 4 * (room * 23_040 + SMALL_MODEL + SERVER_BYTES) == pytest.approx(0.85 * H200, rel=1e-4)


def test_more_servers_than_the_gpu_has_room_for_are_refused_with_the_number_that_fits() -> None:
    memory = GpuMemory(H100, SMALL_MODEL, token=23_040)
    with pytest.raises(ConfigError, match=r"per_gpu=8: 85% of a GPU's 80 GB .* set it to 5 or less"):
        cache_tokens(memory, 0.85, 8, wanted=1000, longest=1000)
    assert cache_tokens(memory, 0.85, 5, wanted=1000, longest=1000) == 1000
    with pytest.raises(ConfigError, match="set it to 1"):
        cache_tokens(GpuMemory(SMALL_GPU, SMALL_MODEL, 23_040), 0.85, 2, wanted=1000, longest=1000)


def test_a_cache_on_a_shared_gpu_is_given_in_tokens_unless_the_user_says_it() -> None:
    expected = ["--mem-fraction-static", "0.95", "--max-total-tokens", "1000"]
    assert together_arguments(ServerConfig(), 1000) == expected
    assert together_arguments(ServerConfig(arguments=["--max-total-tokens=9"]), 1000) == expected[:2]


def test_the_bytes_of_a_token_are_those_that_sglang_logged() -> None:
    """SmolLM2-135M: SGLang 0.5.17 took 2 * 7.51 GiB for 700,000 tokens."""
    shape = SimpleNamespace(num_hidden_layers=30, hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
    assert 700_000 * token_bytes(shape, 2) == pytest.approx(2 * 7.51 * 2**30, rel=0.001)
