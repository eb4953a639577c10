"""Spellings of paths: which are URLs of fsspec, and which are paths of the local disk. No I/O.

A name on the local disk may contain ``::``, by which fsspec joins URLs: of ``run::A`` and ``run::B`` it would make one
place, ``run``. So ``::`` joins only what begins with protocols.
"""

from __future__ import annotations

import os
import re

from lightning_shard.checkpoint.store.credentials import refuse_secrets
from lightning_shard.errors import CheckpointError

_MANIFEST = "manifest.json"
_LOCAL = ("file", "local")
"""Protocols of the local disk."""
_CUT_URL = re.compile(r"[A-Za-z][\w+.-]+:/(?!/)")
_PROTOCOL = re.compile(r"[A-Za-z][\w+.-]*")


def as_path(path: str | os.PathLike[str]) -> str:
    """Normalize a checkpoint's path: to ``str``, without a trailing slash or a trailing ``manifest.json``.

    Raises:
        CheckpointError: No path, empty, a URL that was converted to a ``Path``, or a URL with a secret.
    """
    text = as_text(path)
    folder, name = parted(text)
    return folder if name == _MANIFEST else _without_slashes(text)


def as_text(path: str | os.PathLike[str], what: str = "path") -> str:
    """A path or URL as ``str``, otherwise unchanged. ``what``: the argument's name, for errors.

    Raises:
        CheckpointError: As :func:`as_path`.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise CheckpointError(f"{what} ({path!r:.80}) must be a str or a path that gives one.")
    if not text:
        raise CheckpointError(f"{what} is empty: name the checkpoint's directory.")
    if "\0" in text:
        raise CheckpointError(f"{what} ({text!r:.80}) holds a NUL character, which no file system's names can.")
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise CheckpointError(f"{what} ({text!r:.80}) holds half a character, which no name can.") from None
    if _CUT_URL.match(text):
        raise CheckpointError(
            f"{what} ({text}) looks like a URL that was converted to pathlib.Path, which makes it a local path: pass"
            " the URL as a str."
        )
    refuse_secrets(text)
    return text


def local_path(path: str) -> str | None:
    """The path on the local disk that ``path`` names; None if it is a URL of another place.

    A leading ``~`` is the home folder, as it is for fsspec, and so for Lightning's own checkpoints.

    Raises:
        CheckpointError: A URL that begins in the middle of the path, or is joined to something that is none.
    """
    scheme, found, rest = path.partition("://")
    if found and scheme in _LOCAL:
        return os.path.expanduser(rest or "/")
    joined = path.split("::")
    if not found and (len(joined) == 1 or not _is_protocol(joined[0])):
        return os.path.expanduser(path)
    if not _PROTOCOL.fullmatch(scheme.partition("::")[0]):
        raise CheckpointError(f"path ({path}) has '://' in its middle: a URL begins with its protocol.")
    wrong = [part for part in joined if not _is_protocol(part.partition("://")[0])] if len(joined) > 1 else []
    if wrong:
        raise CheckpointError(
            f"path ({path}) holds '::', which joins URLs, and {wrong[-1]!r} is none: choose a name without '::'."
        )
    return None


def absolute(path: str | os.PathLike[str]) -> str:
    """:func:`as_path`, made absolute if local, so that later use doesn't depend on the working directory."""
    text = as_path(path)
    local = local_path(text)
    return text if local is None else os.path.join(os.getcwd(), local)


def parted(path: str) -> tuple[str, str]:
    """A path's folder and the name in it. The folder of ``memory://a`` is ``memory://``, and that of ``a`` is ``.``."""
    folder, slash, name = path.rpartition("/")
    if folder.endswith(":/"):
        return f"{folder}/", name
    return _without_slashes(folder + slash) if slash else ".", name


def _without_slashes(path: str) -> str:
    scheme, found, rest = path.rpartition("://")
    return scheme + found + rest.rstrip("/") if found else path.rstrip("/") or "/"


def _is_protocol(word: str) -> bool:
    from fsspec.registry import known_implementations, registry

    return word in known_implementations or word in registry
