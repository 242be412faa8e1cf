"""Forms with files: read in memory, and refused where they are none."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from untorch.serve.openai.answers import guarded
from untorch.serve.openai.forms import read_form


async def lengths(request: Request) -> Response:
    return JSONResponse([(key, len(value)) for key, value in await read_form(request, max_files=2)])


@pytest.fixture
def client() -> TestClient:
    return TestClient(Starlette(routes=[Route("/", guarded(lengths), methods=["POST"])]))


def test_large_files_need_no_disk(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's file system may be read-only."""

    def no_disk(*_: Any) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", no_disk)
    answer = client.post("/", files={"file": ("a", b"a" * 3_000_000)}, data={"model": "x"})
    assert sorted(answer.json()) == [["file", 3_000_000], ["model", 1]]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"files": [("file", ("a", b"a"))] * 3}, "the form: Too many files. Maximum number of files is 2."),
        ({"content": b"a", "headers": {"content-type": "multipart/form-data"}}, "the form: Missing boundary"),
        (
            {"files": {"a": b"a"}, "headers": {"content-encoding": "gzip"}},
            "Content-Encoding: expected none for a form, got 'gzip'",
        ),
    ],
)
def test_refusals(client: TestClient, request_: dict[str, Any], text: str) -> None:
    answer = client.post("/", **request_)
    assert (answer.status_code, answer.json()["error"]["message"][: len(text)]) == (400, text)
