"""A shell and its device thread that run for the length of a block, on virtual time or real."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from rota.sched.shell import Shell


@asynccontextmanager
async def running_shell(shell: Shell, thread: Any) -> AsyncIterator[None]:
    """``thread``: a `SimThread`. The shell is closed at the end, whatever happens in the block."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(thread.run)
        await tasks.start(shell.run)
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                shell.close()
                await shell.closed.wait()
                thread.stop()
