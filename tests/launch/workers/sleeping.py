"""A plain script that writes the notice of its own node, and would sleep for long if nobody ended it."""

import sys
import time
from pathlib import Path

partial = Path(sys.argv[1] + ".partial")
partial.write_text("the test says so")
partial.rename(sys.argv[1])
time.sleep(300)
Path(sys.argv[1] + ".end").touch()
