"""Standard streams of a worker that a full disk does not turn against the program that prints."""

from __future__ import annotations

import errno
import io
import select
from typing import Any


class Output(io.FileIO):
    """A standard stream that never raises for want of room.

    A file that takes nothing more loses what is printed, and gets a line that says so once it takes some again.
    """

    _FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
    num_lost = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            if self.num_lost:
                super().write(
                    f"\nphalanx: {self.num_lost} bytes of output were lost: the disk was full\n".encode()
                )
                self.num_lost = 0
            rest = view
            while rest:
                count: int | None = super().write(rest)
                if count is None:  # somebody made a console non-blocking
                    select.select([], [self], [], 1.0)
                rest = rest[count or 0 :]
        except OSError as error:
            if error.errno not in self._FULL:
                raise
            self.num_lost += len(view)
        return len(view)
