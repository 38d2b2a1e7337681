"""Remote models against a real HTTP server in a thread."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.config.schema import OutcomeModelConfig, ScoringModelConfig
from asyncrl.errors import ConfigError, ScoringError, UnavailableError
from asyncrl.scoring.models.registry import load_outcome_model, load_prm
from asyncrl.scoring.models.remote import JsonEndpoint
from asyncrl.scoring.transcript import Passage
from tests.scoring.models.support import LLAMA3, SHAPE, byte_tokenizer, load, save

TOKENIZER = byte_tokenizer("<|start|>", "<|end|>", "<|eot|>", bos="<s>", add_bos=True, template=LLAMA3)
BATCH = [
    [Passage("<q>", False, "q"), Passage("a<e>", True, "a"), Passage("tool", False), Passage("b", True)],
    [Passage("r", False), Passage("c", True)],
    [Passage("no steps", False)],
]


@contextmanager
def serving(answer):
    """The URL of a server; `answer(path, body)` gives a body, a (status, body), or bytes."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = answer(self.path, body)
            status, reply = reply if isinstance(reply, tuple) else (200, reply)
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with suppress(BrokenPipeError):
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/scores"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def remote(url, **params):
    return load_prm(ScoringModelConfig(family="remote", path=url, params=params))


def outcome(url, **params):
    return load_outcome_model(OutcomeModelConfig(family="remote", path=url, params=params))


def test_the_plain_contract_sends_the_segments_and_takes_a_probability_a_step():
    seen = []

    def answer(path, body):
        seen.append((path, body))
        return {"scores": [[0.25, 1.0], [0.5], []]}

    with serving(answer) as url:
        model = remote(url, version="7")
        scores = model.score(BATCH)
    assert [each.probability.tolist() for each in scores] == [[0.25, 1.0], [0.5], []]
    assert scores[0].logit[0] == pytest.approx(np.log(1 / 3))
    ((path, body),) = seen
    assert path == "/scores"
    assert body["episodes"][0]["segments"][:2] == [
        {"text": "<q>", "plain": "q", "is_step": False},
        {"text": "a<e>", "plain": "a", "is_step": True},
    ]
    assert model.name == f"{url.removeprefix('http://')}@7"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"scores": [[0.5, 0.5], [0.5]]}, "3 entries"),
        ({"scores": [[0.5], [0.5], []]}, "must give 2 scores"),
        ({"scores": [[0.5, float("nan")], [0.5], []]}, "not finite"),
        ({"scores": [[0.5, 7.0], [0.5], []]}, "outside"),
        ({"scores": [[0.5, "high"], [0.5], []]}, "are not numbers"),
        ({"scores": [[0.5, None], [0.5], []]}, "are not numbers"),
        ({"other": 1}, "3 entries"),
        ([1, 2, 3], "3 entries"),
        (b"<html>", "not JSON"),
        (b"1" * 5000, "not JSON"),
        (b"[" * 100_000, "not JSON"),
        ((400, {"error": "too long"}), "status 400.*too long"),
    ],
)
def test_nonsense_is_an_error_and_never_a_zero(answer, problem):
    calls = []
    with serving(lambda *_: calls.append(1) or answer) as url, pytest.raises(ScoringError, match=problem):
        remote(url).score(BATCH)
    assert len(calls) == 1


@pytest.mark.slow
def test_a_server_that_is_busy_is_asked_again_and_not_for_ever():
    answers = [(503, {}), (429, {}), {"scores": [0.5, 2.0, -1.0]}]
    with serving(lambda *_: answers.pop(0)) as url:
        assert outcome(url, retries=2).score(BATCH) == [0.5, 2.0, -1.0]
    calls = []
    with serving(lambda *_: calls.append(1) or (503, {})) as url, pytest.raises(UnavailableError, match="status 503"):
        outcome(url, retries=2).score(BATCH)
    assert len(calls) == 3


def test_an_answer_that_breaks_off_is_asked_for_again():
    """A server may die while it writes. Half a number would be read as a number."""
    whole = b'{"scores": [0.5, 0.25, 0.125]}'
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(whole)
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n1e\r\n"
    answers = [
        b"",
        b"HTTP/1.1 2",
        b"garbage\r\n\r\n",
        head,
        head + whole[:20],
        chunked,
        chunked + whole[:20],
        head + whole,
    ]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        endpoint = JsonEndpoint(url, 20.0, len(answers), pause=lambda _: asyncio.sleep(0))
        assert endpoint.post("", {}) == {"scores": [0.5, 0.25, 0.125]}
        thread.join()


def test_a_server_that_hangs_costs_the_time_limit():
    release = threading.Event()
    with serving(lambda *_: {"scores": [release.wait(10)]}) as url:
        with pytest.raises(UnavailableError, match=r"no whole answer within 0\.2 s"):
            remote(url, timeout_s=0.2, retries=5).score(BATCH)
        release.set()


def test_pauses_grow():
    pauses = []

    async def pause(seconds):
        pauses.append(seconds)

    with serving(lambda *_: (500, {})) as url, pytest.raises(UnavailableError, match="status 500"):
        JsonEndpoint(url, timeout_s=20.0, retries=3, pause=pause).post("", {})
    assert pauses == [0.1, 0.2, 0.4]
    # No server listens there any more.
    with pytest.raises(UnavailableError, match="gave no scores"):
        remote(url, retries=1).score(BATCH)


def test_an_answer_that_drips_in_costs_the_time_limit_too():
    """Every byte comes in time, and the whole never."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while not over.wait(0.01):
                    connection.sendall(b"a")

        thread = threading.Thread(target=serve)
        thread.start()
        endpoint = JsonEndpoint(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.3, retries=0)
        with pytest.raises(UnavailableError, match=r"no whole answer within 0\.3 s"):
            endpoint.post("", {})
        over.set()
        thread.join()


@pytest.mark.parametrize("status", [301, 404, 429, 500, 503])
def test_a_status_that_does_not_blame_the_episodes_says_that_the_service_is_away(status):
    with serving(lambda *_: (status, {})) as url, pytest.raises(UnavailableError, match=f"status {status}"):
        remote(url, retries=0).score(BATCH)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder of a label model, and what an SGLang server with it answers."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    folder = save(tmp_path_factory.mktemp("models") / "rlhflow", model, TOKENIZER)

    @torch.no_grad()
    def logprobs(ids):
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def answer(path, body):
        if path.endswith("/generate"):
            ids, start, labels = body["input_ids"], body["logprob_start_len"], body["token_ids_logprob"]
            found = logprobs(ids)
            entries = [
                [[float(found[at - 1, label]), label, None] for label in labels] for at in range(start + 1, len(ids))
            ]
            return {"text": "", "meta_info": {"input_token_ids_logprobs": [None, *entries]}}
        assert path.endswith("/v1/score")
        rows = [logprobs(body["query"] + item)[-1, body["label_token_ids"]].softmax(-1) for item in body["items"]]
        return {"scores": [row.tolist() for row in rows]}

    return folder, answer


@pytest.mark.parametrize("contract", ["generate", "score"])
def test_a_label_model_behind_sglang_scores_as_it_does_here(served, contract):
    folder, answer = served
    with serving(answer) as url:
        model = remote(url, contract=contract, format="rlhflow", tokenizer=str(folder))
        found = model.score(BATCH)
    for here, there in zip(load(folder, "rlhflow").score(BATCH), found, strict=True):
        np.testing.assert_allclose(there.probability, here.probability, atol=1e-5)
        np.testing.assert_allclose(there.logit, here.logit, atol=1e-3)


@pytest.mark.parametrize(
    ("contract", "answer"),
    [
        ("generate", {"meta_info": {}}),
        ("generate", {"meta_info": {"input_token_ids_logprobs": [None]}}),
        ("generate", {"meta_info": {"input_token_ids_logprobs": [[[-1.0, 5, None]]] * 99}}),
        ("score", {"scores": [[0.5, 0.5]]}),
        ("score", {"scores": [[0.9, 0.9]] * 2}),
        ("score", {"scores": [[0.9]] * 2}),
    ],
)
def test_an_sglang_server_without_the_labels_is_an_error(served, contract, answer):
    folder, _ = served
    with serving(lambda *_: answer) as url:
        model = remote(url, contract=contract, tokenizer=str(folder))
        with pytest.raises(ScoringError, match=r"127\.0\.0\.1"):
            model.score(BATCH[:1])


def test_a_classifier_behind_sglang_scores_whole_episodes(served):
    folder, _ = served
    seen = []

    def answer(path, body):
        seen.append((path, body["input_ids"]))
        return [{"embedding": [len(ids) / 2]} for ids in body["input_ids"]]

    with serving(answer) as url:
        scores = outcome(url, contract="classify", tokenizer=str(folder)).score(BATCH[:2])
    ((path, ids),) = seen
    assert path == "/scores/classify"
    text = "<s><|start|>user<|end|>\n\nr<|eot|><|start|>assistant<|end|>\n\nc<|eot|>"
    assert TOKENIZER.decode(ids[1]) == text
    assert scores == [len(each) / 2 for each in ids]
    with serving(lambda *_: [{"embedding": [0.0, 1.0, 0.0]}]) as url:
        (score,) = outcome(url, contract="classify", tokenizer=str(folder)).score(BATCH[:1])
    assert score == pytest.approx(np.e / (np.e + 2))
    with serving(lambda *_: [{"embedding": []}]) as url, pytest.raises(ScoringError, match="classify gave no scores"):
        outcome(url, contract="classify", tokenizer=str(folder)).score(BATCH[:1])


@pytest.mark.parametrize(
    ("config", "fix"),
    [
        ({"path": "folder"}, "needs a URL"),
        ({"params": {"contract": "grpc"}}, "it must be one of json, generate, score"),
        ({"params": {"timeout_s": 0.0}}, "it must be a number in"),
        ({"params": {"contract": "generate"}}, "tokenizer must be set"),
        ({"long_inputs": "drop_oldest"}, "refuses inputs that are too long"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(config, fix):
    config = {"family": "remote", "path": "http://127.0.0.1:1", **config}
    with pytest.raises(ConfigError, match=fix):
        load_prm(ScoringModelConfig(**config))
