"""What is remembered: the only writer. SQLite by default, PostgreSQL for teams; one module per noun.

A command is a function of a `Transaction` and frozen values, a query a function of a `Reader`. Modules are imported by
name: `store.run(instances.move_instance, ...)`, `store.read(instances.list_instances, ...)`.
"""
