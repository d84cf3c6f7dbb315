"""Says what happens to a job, in one stream of typed events: their types, their lines of JSON, and the file they go to.

Agents and workers write the same kind of line; history, report and metrics read the same types.
``phalanx.launch.events`` is the public name.
"""
