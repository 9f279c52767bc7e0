"""The verbs of the library from outside, over the HTTP API of a daemon. Nothing is imported here: a command pays for
what it uses (`ostler.client.blocking` needs only the standard library, `ostler.client.client` is async and typed).
"""
