"""What things are: frozen records with their ranges, named values, transition tables, events. No I/O, no clock.

Modules are imported by name (`from ostler.model.states import AgentState`), so that a program loads only what it
uses. Public names can also be imported from `ostler`.
"""
