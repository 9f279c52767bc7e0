"""A user's repository, the workdirs of a home, and an agent that plants programs wherever git could run one."""

from __future__ import annotations

import os
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from ostler.errors import CheckoutBlockedError
from ostler.workdirs import Accepted, Snapshot, Workdir, Workdirs

ADA = "Ada Lovelace <ada@example.org>"
_IDENTITY = ("-c", "user.name=Agent", "-c", "user.email=agent@example.org")


def git(where: Path, *arguments: str, check: bool = True) -> str:
    """What a person or an agent types there, with whatever settings the repository has."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(where), "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    done = subprocess.run(
        ["git", *_IDENTITY, *arguments], cwd=where, env=environment, capture_output=True, text=True, check=False
    )
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


def make_repository(path: Path, files: dict[str, str] | None = None, *options: str) -> Path:
    path.mkdir(parents=True)
    git(path, "init", "--quiet", "--initial-branch=main", *options)
    for name, text in (files or {"a.txt": "one\ntwo\nthree\n", "b.txt": "b\n", "sub/c.txt": "c\n"}).items():
        place = path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    git(path, "add", "--all")
    git(path, "commit", "--quiet", "--message=first")
    return path


def commit_all(where: Path, message: str = "more") -> str:
    git(where, "add", "--all")
    git(where, "commit", "--quiet", f"--message={message}")
    return git(where, "rev-parse", "HEAD").strip()


def shell(where: Path, command: str) -> None:
    """A command that a person types there."""
    person = {f"GIT_{role}_{part}": "u@u" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    subprocess.run(["sh", "-ec", command], cwd=where, check=True, capture_output=True, env={**os.environ, **person})


def write(folder: Path, name: bytes, data: bytes) -> None:
    with open(os.fsencode(folder) + b"/" + name, "wb") as file:  # noqa: PTH123 - bytes
        file.write(data)


def read(folder: Path, name: bytes) -> bytes:
    with open(os.fsencode(folder) + b"/" + name, "rb") as file:  # noqa: PTH123 - bytes
        return file.read()


def tree_of(root: Path) -> dict[str, tuple[str, int, bytes]]:
    """Everything below a directory, by what it is: kind, mode and contents."""
    found: dict[str, tuple[str, int, bytes]] = {}
    for folder, folders, names in os.walk(os.fsencode(root)):
        for name in (*folders, *names):
            path = os.path.join(folder, name)  # noqa: PTH118 - bytes
            status = os.lstat(path)
            mode = stat.S_IMODE(status.st_mode)
            shown = os.fsdecode(os.path.relpath(path, os.fsencode(root)))
            if stat.S_ISLNK(status.st_mode):
                found[shown] = ("link", 0, os.readlink(path))  # noqa: PTH115 - bytes
            elif stat.S_ISDIR(status.st_mode):
                found[shown] = ("folder", mode, b"")
            else:
                with open(path, "rb") as file:  # noqa: PTH123 - bytes
                    found[shown] = ("file", mode, file.read())
    return found


@dataclass
class Ground:
    """One repository of a user, one home."""

    repository: Path
    home: Path
    workdirs: Workdirs

    async def prepared(self, key: str = "T1") -> tuple[Workdir, Path]:
        workdir = await self.workdirs.plan(key, near=self.repository)
        await self.workdirs.prepare(workdir)
        return workdir, Path(workdir.path)

    async def changed(self, key: str = "T1", **files: str) -> tuple[Workdir, Snapshot]:
        """A workdir in which these files were written, and its snapshot. `a_txt` stands for `a.txt`."""
        workdir, place = await self.prepared(key)
        for name, text in files.items():
            (place / name.replace("_", ".")).write_text(text)
        return workdir, await self.workdirs.snapshot(workdir, f"{key} as it is")

    async def accept(
        self, workdir: Workdir, snapshot: Snapshot, paths: list[str] | None = None, *, branch_only: bool = False
    ) -> Accepted:
        return await self.workdirs.accept(
            workdir, snapshot, paths=paths, message=f"{workdir.key}: done", author=ADA, branch_only=branch_only
        )

    async def refused(self, workdir: Workdir, snapshot: Snapshot) -> CheckoutBlockedError:
        """The refusal of an accept that changed nothing of the user's: neither refs nor files nor the index."""
        before = tree_of(self.repository), self.status()
        with pytest.raises(CheckoutBlockedError, match="Nothing was changed") as raised:
            await self.accept(workdir, snapshot)
        assert (tree_of(self.repository), self.status()) == before
        return raised.value

    def git(self, *arguments: str) -> str:
        return git(self.repository, *arguments)

    def tip(self, branch: str = "main") -> str:
        return self.git("rev-parse", branch).strip()

    def status(self) -> str:
        return self.git("status", "--porcelain")


def plant(place: Path, canary: Path) -> None:
    """Every way to make git run a program that an agent can write into its own repository and work tree."""
    program = place.parent / "evil"
    program.write_text(f"#!/bin/sh\necho \"$0 $*\" >> '{canary}'\ncat\n")
    program.chmod(0o755)
    hooks = place / ".git" / "hooks"
    hooks.mkdir(exist_ok=True)
    for name in (
        "pre-commit",
        "post-checkout",
        "post-index-change",
        "reference-transaction",
        "post-merge",
        "pre-auto-gc",
    ):
        (hooks / name).write_text(program.read_text())
        (hooks / name).chmod(0o755)
    settings = {
        "core.hooksPath": str(hooks),
        "core.fsmonitor": str(program),
        "core.sshCommand": str(program),
        "core.pager": str(program),
        "core.editor": str(program),
        "core.askPass": str(program),
        "core.alternateRefsCommand": str(program),
        "core.gitProxy": str(program),
        "uploadpack.packObjectsHook": str(program),
        "credential.helper": str(program),
        "gpg.program": str(program),
        "commit.gpgSign": "true",
        "diff.external": str(program),
        "diff.evil.command": str(program),
        "diff.evil.textconv": str(program),
        "filter.evil.clean": str(program),
        "filter.evil.smudge": str(program),
        "filter.evil.required": "true",
        "merge.evil.driver": str(program),
        "submodule.recurse": "true",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{program}",
        "extensions.partialClone": "origin",
        "protocol.ext.allow": "always",
    }
    lines = []
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        first, _, second = section.partition(".")
        lines += [f'[{first} "{second}"]' if second else f"[{first}]", f'\t{key} = "{value}"']
    with (place / ".git" / "config").open("a") as file:
        file.write("\n".join(lines) + "\n")
    (place / ".gitattributes").write_text("* filter=evil diff=evil merge=evil\n")
