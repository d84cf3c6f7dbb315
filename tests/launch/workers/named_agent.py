"""An agent on a machine of another name: ``named_agent.py NAME run ...``."""

import runpy
import socket
import sys

NAME = sys.argv.pop(1)
socket.gethostname = lambda: NAME
runpy.run_module("phalanx", run_name="__main__")
