"""Spellings of paths: which are URLs of fsspec, which are paths of the local disk, and which hold secrets. No I/O.

A name on the local disk may contain ``::``, by which fsspec joins URLs: of ``run::A`` and ``run::B`` it would make one
place, ``run``. Paths are shown, logged, and saved in checkpoints (as the paths of the best ones), and errors end in
logs: so paths with passwords or keys are refused, and errors are redacted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from lightning_shard.errors import CheckpointError

HIDDEN = "…"
_SECRET_NAME = re.compile(r"token|sig|secret|key|pass|pwd|cred|auth|session|sas|jwt|hmac", re.IGNORECASE)
_NO_SECRET_NAME = re.compile(r"endpoint|region|style|use_ssl|ssh_key_filename|key_filename", re.IGNORECASE)
_USER_IN_HOST = {"sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs", "abfs", "abfss", "az", "adl"}
"""Protocols whose ``user@host`` (Azure: ``container@account``) is a location, not a secret."""
_MIN_CHARS = 4
"""Shorter secrets aren't redacted, since they occur in any error by chance."""


def refuse_secrets(path: str) -> None:
    """Refuse a path that contains a secret."""
    for part in path.split("::"):
        scheme, separator, rest = part.partition("://")
        if not separator:
            continue
        host, query = re.split(r"[/?#]", rest, maxsplit=1)[0], "&".join(re.split(r"[?#]", rest)[1:])
        before, at, after = host.rpartition("@")
        word = None
        if at and (":" in before or scheme not in _USER_IN_HOST):
            word = "a password" if ":" in before else "a key or token"
        elif not at and "@" in rest and ":" in host and not _is_host_and_port(host):
            word, after = "a password", rest.rpartition("@")[2].partition("/")[0]  # a password with a slash
        if word is None and any(_SECRET_NAME.search(unquote(name)) for name in re.findall(r"([^&=]+)=", query)):
            word, after = "a token or signature", host
        if word is not None:
            place = f"{scheme}://{HIDDEN}@{after}" if word != "a token or signature" else f"{scheme}://{after}/{HIDDEN}"
            raise CheckpointError(
                f"The path {place} holds {word}, which would be shown wherever the path is: leave it out, and"
                " pass it in storage_options or in fsspec's own configuration."
            )


def _is_host_and_port(host: str) -> bool:
    return host.startswith("arn:") or host.endswith("]") or host.rpartition(":")[2].isdigit()


def redact(text: str, options: Mapping[str, Any]) -> str:
    """Remove from a text all secrets that are in storage options."""
    for secret in sorted(set(_secrets(options)), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def places(value: Any, name: str = "") -> Iterator[str]:
    """Yield ``name=value`` of the strings and ports in storage options, which may locate a store; without secrets."""
    if isinstance(value, Mapping):
        for inner in sorted(value, key=str):
            if not _is_secret(inner):
                yield from places(value[inner], f"{name}/{inner}")
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from places(inner, name)
    elif isinstance(value, str) and ";" in value and "=" in value:  # Azure's connection strings contain a key
        yield from places(dict(part.partition("=")[::2] for part in value.split(";")), name)
    elif isinstance(value, str):
        yield f"{name}={re.sub('://[^/]*@', '://', value)}"
    elif isinstance(value, int) and name.endswith("port"):
        yield f"{name}={value}"


def _is_secret(name: Any) -> bool:
    return bool(_SECRET_NAME.search(str(name))) and not _NO_SECRET_NAME.search(str(name))


def _secrets(value: Any, named: bool = False) -> Iterator[str]:
    """Yield the strings at any depth below a secret's name, and passwords in any URL."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secrets(inner, named or _is_secret(name))
    elif isinstance(value, list | tuple | set):
        for inner in value:
            yield from _secrets(inner, named)
    elif isinstance(value, str):
        if named and len(value) >= _MIN_CHARS:
            yield value
        elif "://" in value and "@" in value:
            yield urlsplit(value).netloc.rpartition("@")[0]


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
    """A path or URL as ``str``, otherwise unchanged. ``what``: the argument's name, for errors."""
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
    """
    scheme, found, rest = path.partition("://")
    if not found:
        return os.path.expanduser(path)
    if scheme in _LOCAL:
        return os.path.expanduser(rest or "/")
    if not _PROTOCOL.fullmatch(scheme.partition("::")[0]):
        raise CheckpointError(f"path ({path}) has '://' in its middle: a URL begins with its protocol.")
    last = path.rpartition("::")[2]
    if "://" not in last:
        raise CheckpointError(
            f"path ({path}) holds '::', which joins URLs, and {last!r} is none: choose a name without '::'."
        )
    return None


def absolute(path: str | os.PathLike[str]) -> str:
    """:func:`as_path`, made absolute if local, so that later use doesn't depend on the working directory."""
    text = as_path(path)
    local = local_path(text)
    return text if local is None else os.path.join(os.getcwd(), local)


def parted(path: str) -> tuple[str, str]:
    """A path's folder, and the name in it. ``memory://a`` is in ``memory://``; ``a``, and ``file://a``, in ``.``."""
    folder, slash, name = path.rpartition("/")
    if folder.endswith(":/"):
        return "." if folder[:-2] in _LOCAL else f"{folder}/", name
    return _without_slashes(folder + slash) if slash else ".", name


def _without_slashes(path: str) -> str:
    scheme, found, rest = path.rpartition("://")
    return scheme + found + rest.rstrip("/") if found else path.rstrip("/") or "/"
