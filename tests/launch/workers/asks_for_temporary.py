"""A module that some imports are like: it asks for the temporary directory, which Python then remembers."""

import tempfile

DIRECTORY = tempfile.gettempdir()
