"""HTTP as `rota serve` listens for it: TLS, and limits of headers and connections."""

from __future__ import annotations

import ssl
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
import trustme

from rota.errors import CommandError
from rota.sched.serve.command import serve

from .command_line import options, quiet, simulated


@pytest.mark.anyio
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nx: "])
async def test_headers_that_never_come_close_the_connection(tmp_path: Path, sent: bytes) -> None:
    config = options("m", "--port", "0", "--header-timeout-s", "0.1")
    async with anyio.create_task_group() as tasks:
        url = await tasks.start(partial(serve, config, quiet(), engine=simulated))
        host, port = url.removeprefix("http://").split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            if sent:
                await stream.send(sent)
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
        # An idle connection between two requests is not one that sends headers slowly.
        async with httpx2.AsyncClient() as http:
            for pause in (0.0, 0.3):
                await anyio.sleep(pause)  # idle for longer than headers may take
                assert (await http.get(f"{url}/health")).status_code == 200
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_https_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for blob in pair.cert_chain_pems:
        blob.write_to_path(cert, append=True)
    pair.private_key_pem.write_to_path(key)
    config = options("m", "--port", "0", "--tls-cert", str(cert), "--tls-key", str(key))
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    async with anyio.create_task_group() as tasks:
        url = await tasks.start(partial(serve, config, quiet(), engine=simulated))
        assert url.startswith("https://")
        async with httpx2.AsyncClient(verify=trust) as http:
            assert (await http.get(f"{url}/health")).json() == {"status": "ok"}
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_wrong_certificate_is_refused_by_name(tmp_path: Path) -> None:
    cert, missing = tmp_path / "cert.pem", tmp_path / "missing.pem"
    cert.write_text("not a certificate")
    for path in (cert, missing):
        config = options("m", "--port", "0", "--tls-cert", str(path), "--tls-key", str(path))
        with pytest.raises(CommandError) as caught:
            await serve(config, quiet(), engine=simulated)
        assert caught.value.code == "bad-tls"
    with pytest.raises(CommandError) as refused:
        options("m", "--tls-cert", str(cert))
    assert (refused.value.code, refused.value.subject) == ("bad-option", "tls_key")


@pytest.mark.anyio
@pytest.mark.parametrize("whole", [False, True])
async def test_headers_larger_than_the_limit_are_refused(whole: bool) -> None:
    """Whether they come in small pieces or all at once."""
    config = options("m", "--port", "0", "--max-header-bytes", "2048")
    async with anyio.create_task_group() as tasks:
        url = await tasks.start(partial(serve, config, quiet(), engine=simulated))
        host, port = url.removeprefix("http://").split(":")

        async def status(filler: int) -> bytes:
            head = b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * filler + b"\r\n\r\n"
            # No more pieces than it takes: what is sent to who has closed resets the connection.
            size = len(head) if whole else 500
            pieces = [head[at : at + size] for at in range(0, len(head), size)][:5]
            async with await anyio.connect_tcp(host, int(port)) as stream:
                for piece in pieces:
                    await stream.send(piece)
                return bytes((await stream.receive()).split(b"\r\n")[0])

        assert b" 200 " in await status(1500)
        assert b" 400 " in await status(4000)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_connections_over_the_limit_are_told_to_come_back() -> None:
    config = options("m", "--port", "0", "--max-connections", "2")
    async with anyio.create_task_group() as tasks:
        url = await tasks.start(partial(serve, config, quiet(), engine=simulated))
        host, port = url.removeprefix("http://").split(":")

        async def status(stream: Any) -> bytes:
            await stream.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            return bytes((await stream.receive()).split(b"\r\n")[0])

        async with await anyio.connect_tcp(host, int(port)) as first:
            assert b" 200 " in await status(first)
            async with await anyio.connect_tcp(host, int(port)) as second:
                assert b" 503 " in await status(second)
        async with await anyio.connect_tcp(host, int(port)) as third:
            with anyio.fail_after(20):
                while b" 200 " not in await status(third):
                    await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
