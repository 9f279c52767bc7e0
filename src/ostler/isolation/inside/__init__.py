"""What runs in the process of a Python agent, and in the preloaded parent that such processes are forked from.

`template` is the parent, `host` the agent's own loop, `speaking` its way to the manager, `finding_source` how the
class of the agent is found there. Nothing here may import the store, the lifecycle or the telemetry: what is loaded
here every agent pays for.
"""
