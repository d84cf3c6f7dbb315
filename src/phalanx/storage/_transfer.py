"""Moves files and folders between the disk and a bucket, so that a folder is there completely or not at all.

A folder in a bucket has one object that readers look for first (a manifest, an index). It is written last: that is the
commit. It is removed first when the folder is removed or replaced. A writer that is killed leaves objects that nobody
reads, which the next writer removes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from phalanx.storage._remote_path import RemotePath


def upload_file(file: Path, target: RemotePath) -> None:
    """Store a file of this machine as one object, which appears when all of it is there."""
    with open(file, "rb") as opened:
        target.bucket.put(target.key, opened, size=os.fstat(opened.fileno()).st_size)


def upload_folder(
    folder: Path,
    target: RemotePath,
    last: str,
    *,
    names: Sequence[str] | None = None,
    is_unwanted: Callable[[], bool] = lambda: False,
) -> bool:
    """Store the files of a folder (or those of these ``names``), ``last`` as the commit; False if given up in between.

    All files are opened at the start: whoever removes the folder meanwhile does not disturb. What lay at ``target`` is
    not to be seen from the first byte on, and the objects of it that the new folder has not are gone at the end.
    """
    if names is None:
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    ordered = [*(name for name in names if name != last), last]
    with ExitStack() as stack:
        opened = {name: stack.enter_context(open(folder / name, "rb")) for name in ordered}
        (target / last).unlink(missing_ok=True)
        for name, file in opened.items():
            if is_unwanted():
                return False
            one = target / name
            one.bucket.put(one.key, file, size=os.fstat(file.fileno()).st_size)
    remove_objects(target, (name for name, _ in target.walk() if name not in opened))
    return True


def download_folder(source: RemotePath, folder: Path) -> None:
    """Write the objects below ``source`` into an empty folder, and have them on the disk."""
    for name, size in source.walk():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        download_file(source / name, file, size)


def download_file(source: RemotePath, file: Path, size: int | None = None) -> None:
    """Write one object to a file, in ranges that are fetched several at a time."""
    left = source.size() if size is None else size
    with open(file, "wb") as out, source.open() as opened:
        while block := opened.read(min(left, 1 << 20)):
            out.write(block)
            left -= len(block)
        out.flush()
        os.fsync(out.fileno())
    if left:
        raise OSError(f"{source} changed while it was read: {left} bytes are missing")


def remove_folder(folder: RemotePath, first: str) -> None:
    """Remove a folder; from the moment that ``first`` is gone nobody sees it."""
    (folder / first).unlink(missing_ok=True)
    remove_objects(folder, [name for name, _ in folder.walk()])


def remove_objects(folder: RemotePath, names: Iterable[str]) -> None:
    for name in list(names):
        (folder / name).unlink(missing_ok=True)
