"""The daemon of a home: the manager and the API of one home, in one process."""
