"""Run by test_malicious.py in a process of its own: opens what a stranger made, under an audit hook that stays.

``python -m tests.checkpoint.faults.malicious FOLDER`` prints one JSON object: by the checkpoint's name what came of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path

import torch

from lightning_shard import checkpoint
from lightning_shard.errors import CheckpointError
from tests.paths import ROOT

MEMORY_BYTES = 3 * 2**30
RUNS_CODE = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.spawn",
    "subprocess.Popen",
    "ctypes.dlopen",
    "shutil.rmtree",
}
CHANGES = {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
CONNECTS = {"socket.connect", "socket.getaddrinfo", "urllib.Request"}


class Watch:
    """What this process does while it looks at one checkpoint."""

    def __init__(self) -> None:
        self.allowed: str | None = None
        self.seen: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        if self.allowed is None:
            return
        if event == "open" and isinstance(args[0], str):
            path = os.path.abspath(args[0])
            mode, flags = args[1], args[2]
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            # of Python's own files those that an import reads, of this machine's what says how much memory it has
            ours = path.startswith((sys.prefix, sys.base_prefix, REPOSITORY)) and not writes
            if not (
                path == self.allowed or path.startswith((self.allowed + "/", "/proc/", "/sys/", "/dev/null")) or ours
            ):
                self.seen.append(f"open {path} {mode}")
            elif writes:
                self.seen.append(f"write {path}")
        elif event == "ctypes.dlopen" and args == ("libnvidia-ml.so.1",):
            pass  # torch built for CUDA asks whether there is a device
        elif event in RUNS_CODE | CHANGES | CONNECTS:
            self.seen.append(f"{event} {args!r:.200}")
        elif event == "import" and "evil" in str(args[0]):
            self.seen.append(f"import {args[0]}")
        elif event == "compile" and "evil" in repr(args):
            self.seen.append("compile")


REPOSITORY = str(ROOT)


def everything(path: str) -> None:
    """All that a user may do with a checkpoint that was given to them; each verb refuses or gives values."""
    stored = checkpoint.read(path)
    for section in (stored, stored.optimizer):
        for name in list(section)[:50]:
            with contextlib.suppress(CheckpointError):
                section[name][..., :1] if section[name].shape else section[name].full()
    for verb in (stored.full, stored.optimizer.full, lambda: stored.trainer_state(lenient=True), stored.trainer_state):
        try:
            verb()
        except CheckpointError as error:
            refusals.append(str(error))
    for rank in list(stored.manifest.ranks)[:5]:
        try:
            stored.rank_state(rank)
        except CheckpointError as error:
            refusals.append(str(error))
    for tool in (checkpoint.inspect, checkpoint.verify, lambda path: checkpoint.diff(path, path)):
        try:
            report = tool(path)
            refusals.extend(str(fault) for fault in getattr(report, "faults", []))
        except CheckpointError as error:
            refusals.append(str(error))


refusals: list[str] = []


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    everything(os.path.join(folder, "sound"))  # imports what is imported late
    checkpoint.read(os.path.join(folder, "sound.ckpt")).full()
    torch.empty(10)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    watch = Watch()
    found = {}
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        refusals.clear()
        watch.seen = []
        watch.allowed = os.path.abspath(path)
        started = time.monotonic()
        try:
            everything(path)
            error = ""
        except CheckpointError as refusal:
            error, refused = "", str(refusal)
            refusals.append(refused)
        except BaseException as other:
            error = f"{type(other).__name__}: {other!s:.300}"
        seconds = time.monotonic() - started
        print(f"{seconds:6.1f} s: {name}", file=sys.stderr)
        watch.allowed = None
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        found[name] = {
            "error": error,
            "refusals": [text[:300] for text in refusals[:10]],
            "seen": watch.seen[:10],
            "seconds": seconds,
            "grown": grown,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
