"""Keeps secrets out of paths and errors: refuses paths with passwords or keys, and redacts them in error messages.

Reason: paths are shown, logged, and saved in checkpoints (as the paths of the best ones), and errors end in logs. It
also extracts from storage options, without secrets, the values that distinguish one store from another.
"""

from __future__ import annotations

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
    """Refuse a path that contains a secret.

    Raises:
        CheckpointError: It contains one; the message shows the path without it.
    """
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
