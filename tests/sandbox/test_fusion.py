"""A client of SandboxFusion against a real web server that answers as SandboxFusion does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from asyncrl.sandbox.fusion import MAX_BYTES, FusionSandbox, read_answer
from asyncrl.sandbox.sandbox import ProgramResult, SandboxError, SandboxLimits
from tests.network.web import web_server

LIMITS = SandboxLimits(8.0, 4.0, 512)


def answer(overall: str, /, compiled: Any = None, **ran: Any) -> dict[str, Any]:
    """An answer in SandboxFusion's form."""
    result = {"status": "Finished", "execution_time": 0.5, "return_code": 0, "stdout": "", "stderr": "", **ran}
    known = {"message": "", "compile_result": compiled, "executor_pod_name": None, "files": {}}
    return {"status": overall, "run_result": result if ran else None, **known}


GOOD = answer("Success", stdout="5\n")


def asked(answers: Sequence[Any], path: str = "") -> tuple[ProgramResult | SandboxError, list[Any]]:
    """Run a program at a server that gives `answers`. Returns the result and the requests that it got."""
    given, requests = iter(answers), list[Any]()

    async def handler(request: web.Request) -> web.Response:
        requests.append((request.path, await request.json()))
        each = next(given)
        return web.Response(status=each, text="busy") if isinstance(each, int) else web.json_response(each)

    async def main() -> ProgramResult | SandboxError:
        async with web_server(handler) as port:
            sandbox = FusionSandbox(f"http://127.0.0.1:{port}{path}", first_wait_s=0.0)
            try:
                return await sandbox.run("print(input())", LIMITS, stdin=b"5")
            except SandboxError as error:
                return error

    return asyncio.run(main()), requests


@pytest.mark.parametrize("path", ["", "/", "/run_code"])
def test_a_program_is_sent_with_its_input_and_limits(path: str):
    ran, ((where, request),) = asked([GOOD], path)
    assert ran == ProgramResult("5\n", 0)
    assert isinstance(ran, ProgramResult)
    assert ran.seconds == 0.5
    assert where == "/run_code"
    assert request == {
        "code": "print(input())",
        "language": "python",
        "stdin": "5",
        "compile_timeout": 8.0,
        "run_timeout": 8.0,
        "memory_limit_MB": 512,
    }


@pytest.mark.parametrize(
    ("given", "result"),
    [
        (answer("Failed", return_code=1, stdout="a\n", stderr="NameError"), ProgramResult("a\nNameError", 1)),
        (answer("Failed", return_code=-9), ProgramResult("", 137)),
        (answer("Failed", status="TimeLimitExceeded", return_code=None, stdout="a"), ProgramResult("a", None)),
        (
            answer("Failed", {"status": "Finished", "return_code": 1, "stderr": "no such name"}),
            ProgramResult("no such name", 1),
        ),
        (answer("Failed", {"status": "TimeLimitExceeded"}), ProgramResult("", None)),
    ],
)
def test_what_the_program_did_is_its_result(given: Any, result: ProgramResult):
    assert read_answer(given, errors=True) == result


def test_standard_error_is_left_out_where_it_is_not_wanted():
    assert read_answer(answer("Success", stdout="a", stderr="b"), errors=False).printed == "a"


@pytest.mark.slow
@pytest.mark.parametrize(
    "failure",
    [
        500,
        503,
        429,
        answer("SandboxError", status="Error", stderr="no space") | {"message": "no space"},
        answer("Success"),
        {"status": "Failed", "run_result": {"status": "Error"}},
        ["x"],
        ["x" * MAX_BYTES],
        {"status": "Success", "run_result": {"status": "Finished", "return_code": None}},
    ],
)
def test_a_server_that_fails_is_tried_again_and_is_no_result(failure: Any):
    ran, requests = asked([failure, GOOD])
    assert ran == ProgramResult("5\n", 0)
    assert len(requests) == 2
    ran, requests = asked([failure] * 3)
    assert isinstance(ran, SandboxError)
    assert "failed 3 times, at last with" in str(ran)
    assert len(requests) == 3


def test_a_request_that_the_server_refuses_is_not_sent_again():
    ran, requests = asked([422, GOOD])
    assert isinstance(ran, SandboxError)
    assert "refused the request with status 422: b'busy'" in str(ran)
    assert len(requests) == 1


def test_a_server_that_is_not_there_is_a_failure():
    async def main() -> None:
        with pytest.raises(SandboxError, match="Cannot connect"):
            await FusionSandbox("http://127.0.0.1:1", first_wait_s=0.0).run("", LIMITS)

    asyncio.run(main())


def test_an_output_without_end_is_that_of_a_program_that_failed():
    ran, _ = asked([answer("Success", stdout="x" * MAX_BYTES)])
    assert ran == ProgramResult("(the output has more than 16 MiB)", 1)
