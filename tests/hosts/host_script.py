"""What workers on hosts in a box run: the script of ``tests/elastic``, in the network that the host has for workers.

``host_script.py DIR STEPS PACE --netns=DIRECTORY ...``: the worker enters ``DIRECTORY/HOSTNAME`` first, if it is there.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "elastic"))

CLONE_NEWNET = 0x40000000


def enter_network(path: str) -> None:
    """Have this thread, and those that it starts, use another network namespace (``os.setns``: Python 3.12)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network {path}")
    finally:
        os.close(descriptor)


def main() -> None:
    folder = next((Path(word.partition("=")[2]) for word in sys.argv if word.startswith("--netns=")), None)
    if folder is not None:
        enter_network((folder / socket.gethostname()).read_text())
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # the host's name is the address of its agent
    import worker_script  # the network comes first

    worker_script.main()


if __name__ == "__main__":
    main()
