"""The HTTP API of the daemon: one table of routes over the library."""
