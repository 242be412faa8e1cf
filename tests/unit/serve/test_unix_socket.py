"""The file of a Unix domain socket: whose it is, when it is replaced, and when it is removed."""

from __future__ import annotations

import os
import pathlib
import socket
import stat

import pytest

from untorch.runtime.errors import InvalidArgumentError, SystemResourceError
from untorch.serve.addresses import Addresses, bind, port_of
from untorch.serve.options import ServeOptions
from untorch.serve.unix_socket import listen_on_path


def refusal(path: pathlib.Path) -> str:
    with pytest.raises(SystemResourceError) as caught:
        listen_on_path(str(path), 4)
    return str(caught.value).removeprefix(f"HTTP cannot listen on the Unix socket {path}: ")


def test_a_socket_is_removed_when_it_is_closed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s"
    options = ServeOptions(models={"m": "m.pt2"}, uds=str(path))
    before = os.umask(0o027)
    try:
        with bind(options) as http:
            assert stat.S_IMODE(path.stat().st_mode) == 0o750  # the umask's, unlike uvicorn's, which lets all write
            assert (port_of(http), http.getblocking()) == (0, False)
            addresses = Addresses(options, port_of(http), 5)
            assert addresses.to_json() == {"http": f"unix:{path}", "grpc": "127.0.0.1:5"}
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
    finally:
        os.umask(before)
    assert not path.exists()


def test_a_socket_of_a_dead_server_is_replaced(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listen_on_path(str(path), 4), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    assert not path.exists()


def test_a_socket_that_another_server_listens_on(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s"
    with listen_on_path(str(path), 4):
        assert refusal(path) == "another server listens there: end it, or choose another --uds"
        assert path.exists()
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as client:
        busy.bind(str(path))
        busy.listen(0)
        client.connect(str(path))  # nobody accepts it, so the backlog is full
        assert refusal(path) == "another server listens there: end it, or choose another --uds"
        assert path.exists()


def test_what_is_no_socket(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s"
    path.write_text("kept")
    assert refusal(path) == "a file of another kind is there: choose another --uds"
    assert path.read_text() == "kept"
    assert refusal(tmp_path / "none" / "s") == "No such file or directory"


def test_a_file_that_has_become_another_servers_stays(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s"
    with listen_on_path(str(path), 4):
        path.unlink()
        other = listen_on_path(str(path), 4)
    assert path.exists()
    other.close()
    assert not path.exists()
    other.close()


def test_paths_that_are_too_long() -> None:
    ServeOptions(models={"m": "m.pt2"}, uds="/" + "a" * 106)
    with pytest.raises(InvalidArgumentError, match="uds: expected a path of 1 to 107 bytes, got 108: '/ää"):
        ServeOptions(models={"m": "m.pt2"}, uds="/" + "ä" * 53 + "a")
    with pytest.raises(InvalidArgumentError, match="uds: expected a path of 1 to 107 bytes, got 0: ''"):
        ServeOptions(models={"m": "m.pt2"}, uds="")
