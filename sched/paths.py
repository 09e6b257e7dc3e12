"""Which directories a remote caller may name: an allow-list of roots, compared after links.

Owns nothing. Invariant: what is returned has no symbolic link left and lies inside a root.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import CommandError

_MAX_PATH = 4096


def allowed_directory(path: str, roots: Sequence[str] | None) -> str:
    """The real path of ``path``, if it is inside one of ``roots`` (``None``: anywhere).

    Raises:
        CommandError: ``bad-path`` (empty, relative, too long, a NUL), ``path-not-allowed``,
            ``no-such-directory``. Outside the roots nothing is said about what exists.
    """
    if not path or len(path) > _MAX_PATH or "\0" in path:
        raise CommandError(
            "not a path", code="bad-path", expected=f"1 to {_MAX_PATH} characters", found=len(path)
        )
    if not os.path.isabs(path):
        raise CommandError(
            "the path is not absolute", code="bad-path", subject=path, expected="absolute"
        )
    real = os.path.realpath(path)
    if roots is not None and not any(_inside(real, os.path.realpath(root)) for root in roots):
        raise CommandError(
            "the directory is not in the allow-list", code="path-not-allowed", subject=path
        )
    if not os.path.isdir(real):
        raise CommandError(
            "no such directory", code="no-such-directory", subject=path, expected="a directory"
        )
    return real


def _inside(real: str, root: str) -> bool:
    return os.path.commonpath([real, root]) == root
