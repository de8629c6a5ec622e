"""Keys, the admin's token and the admin's socket, as those who run a server use them."""

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from disconnect_watch.ports import bind_unix
from tests.support.command import running
from tests.support.http import request_bytes
from tests.support.serve import Client

ENDLESS: dict[str, Any] = {
    "model": "tiny",
    "prompt": "x",
    "max_tokens": 100_000,
    "ignore_eos": True,
    "stream": True,
}


def make_key(name: str, role: str) -> tuple[str, str]:
    """A key and its line, from the command."""
    made = subprocess.run(
        [sys.executable, "-m", "disconnect_watch.cli", "key", "--name", name, "--role", role],
        capture_output=True,
        text=True,
        check=True,
    )
    return made.stderr.rpartition(": ")[2].strip(), made.stdout


def post(path: str, body: dict[str, Any], *, admin_socket: Path) -> tuple[int, Any]:
    """One request by the admin's door."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(str(admin_socket))
        sock.sendall(request_bytes(path, body, Connection="close"))
        answer = b""
        while data := sock.recv(65536):
            answer += data
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


@pytest.mark.timeout(180)
def test_a_server_with_keys_and_an_admins_socket(tmp_path: Path) -> None:
    (alice, line), (root, root_line) = make_key("alice", "user"), make_key("root", "admin")
    file, admin_socket = tmp_path / "keys", tmp_path / "admin.sock"
    file.write_text(line + root_line)
    options = ("--api-keys", str(file), "--admin-socket", str(admin_socket))
    with running(*options) as server:
        assert not any("admin token" in line for line in server.lines)
        assert stat.S_IMODE(os.stat(admin_socket).st_mode) == 0o600
        base = f"http://127.0.0.1:{server.port}/v1"
        for wrong in ("none", alice[:-1]):
            with (
                openai.OpenAI(base_url=base, api_key=wrong, max_retries=0) as client,
                pytest.raises(openai.AuthenticationError),
            ):
                client.models.list()
        with openai.OpenAI(base_url=base, api_key=alice, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["tiny"]
        with Client(server.port) as client_of_alice:
            client_of_alice.post("/v1/completions", ENDLESS, Authorization=f"Bearer {alice}")
            client_of_alice.read_until(b'"text"')
            status, answer = post(
                "/v1/admin/cancel_all", {"confirm": True}, admin_socket=admin_socket
            )
            assert (status, answer["results"][0]["status"]) == (200, "cancelled")
            assert b"request_cancelled" in client_of_alice.read_until(b"0\r\n\r\n")
        assert not any(secret in line for line in server.lines for secret in (alice, root))
        server.process.terminate()
        assert server.wait() == 0
    assert not admin_socket.exists()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("has_keys", [True, False])
def test_what_an_admin_may_do_is_on_its_port_alone(tmp_path: Path, has_keys: bool) -> None:
    options = ["--admin-port", "0"]
    if has_keys:
        (alice, line), (root, root_line) = make_key("alice", "user"), make_key("root", "admin")
        (tmp_path / "keys").write_text(line + root_line)
        options += ["--api-keys", str(tmp_path / "keys")]
    with running(*options) as server:
        if not has_keys:
            alice = "anybody"
            (root,) = (
                line.partition(": ")[2].strip() for line in server.lines if "admin token" in line
            )
        (serving,) = server.events("serving")

        def ask(port: int, path: str, key: str, body: dict[str, Any], method: str = "POST") -> int:
            with Client(port) as client:
                request = request_bytes(path, body, Authorization=f"Bearer {key}")
                client.sock.sendall(method.encode() + request.removeprefix(b"POST"))
                return client.read_response()[0]

        everything = {"confirm": True}
        for path, body in (
            ("/v1/admin/cancel_all", everything),
            ("/v2/repository/index", {}),
            ("/nobody/knows", {}),
        ):
            assert ask(server.port, path, root, body) == 403, path
        assert ask(server.port, "/metrics", root, {}, "GET") == 403
        assert ask(server.port, "/health", alice, {}, "GET") == 200
        # There an admin is one as all others.
        refused = 403 if has_keys else 401
        assert ask(server.port, "/abort_request", root, {"abort_all": True}) == refused
        with Client(server.port) as client_of_alice:
            client_of_alice.post("/v1/completions", ENDLESS, Authorization=f"Bearer {alice}")
            head = client_of_alice.read_until(b"\r\n\r\n").decode().lower()
            request_id = head.partition("x-request-id: ")[2].split("\r\n")[0]
            cancel = f"/v1/requests/{request_id}/cancel"
            assert ask(server.port, cancel, root, {}) == (404 if has_keys else 401)
            admin_port = serving["admin_port"]
            assert ask(admin_port, "/v1/admin/cancel_all", alice, everything) in (401, 403)
            assert ask(admin_port, "/metrics", root, {}, "GET") == 200
            assert ask(admin_port, "/v1/admin/cancel_all", root, everything) == 200
            assert b"request_cancelled" in client_of_alice.read_until(b"0\r\n\r\n")
        server.process.terminate()
        assert server.wait() == 0


def test_a_file_without_a_key_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none\n")
    command = [sys.executable, "-m", "disconnect_watch.cli", "serve", "--api-keys", str(file)]
    refused = subprocess.run(
        [*command, "--http-port", "0", "--metrics-port", "0"], capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert "has no key, make one with: disconnect-watch key" in refused.stderr


def test_a_socket_that_was_left_behind_is_taken_over_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "admin.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with bind_unix(path) as sock:
        sock.listen()
        in_use = pytest.raises(OSError, match=f"cannot listen on {path}: Address already in use")
        with in_use, bind_unix(path):
            pass
    assert not os.path.exists(path)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(OSError, match="Address already in use"), bind_unix(str(tmp_path / "file")):
        pass
    assert (tmp_path / "file").read_text() == "kept"
