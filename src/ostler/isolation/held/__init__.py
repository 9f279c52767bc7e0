"""Cells of levels whose processes are held by another program: a keeper or a container engine."""
