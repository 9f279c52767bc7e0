"""The plain statements of a shape: insert, update of some columns, select by key, delete, and a page in key order."""

from __future__ import annotations

import functools

from ostler.store.shapes import Shape


def _where_key(shape: Shape) -> str:
    return " AND ".join(f"{name} = ?" for name in shape.keys)


@functools.cache
def select(shape: Shape) -> str:
    return f"SELECT * FROM {shape.table} WHERE {_where_key(shape)}"  # noqa: S608 - names are ours


@functools.cache
def insert(shape: Shape, names: tuple[str, ...]) -> str:
    values = ", ".join("?" * len(names))
    return f"INSERT INTO {shape.table} ({', '.join(names)}) VALUES ({values})"  # noqa: S608 - names are ours


@functools.cache
def update(shape: Shape, names: tuple[str, ...]) -> str:
    sets = ", ".join(f"{name} = ?" for name in names)
    return f"UPDATE {shape.table} SET {sets} WHERE {_where_key(shape)}"  # noqa: S608 - names are ours


@functools.cache
def delete(shape: Shape) -> str:
    return f"DELETE FROM {shape.table} WHERE {_where_key(shape)}"  # noqa: S608 - names are ours


@functools.cache
def page(shape: Shape, further: bool) -> str:
    where = f"WHERE {shape.keys[0]} > :after " if further else ""
    return f"SELECT * FROM {shape.table} {where}ORDER BY {shape.keys[0]} LIMIT :limit"  # noqa: S608 - names are ours
