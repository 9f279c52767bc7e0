"""`Workdirs`: plan, prepare, snapshot, diff, accept, undo, retire, restore. One object per home.

It remembers nothing: what it needs is on the disk or in the records that the caller keeps. Each verb runs in a thread;
those of one key, and those that need git in one repository, wait for one another.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

from ostler.errors import InvalidOperationError, OstlerError, StoreFullError
from ostler.failpoints import Seams
from ostler.model.validation import fault
from ostler.workdirs import capture, prepare, review
from ostler.workdirs.files import opened, parent_of, remove_tree, replace_file, sync_folder
from ostler.workdirs.follow import recover
from ostler.workdirs.git import object_id
from ostler.workdirs.mirror import PLAIN, Author, Mirror, mirror_name
from ostler.workdirs.records import (
    Accepted,
    BaseChange,
    Snapshot,
    Undone,
    VaultEntry,
    Workdir,
    WorkdirKind,
    check_key,
)
from ostler.workdirs.repository import Repository
from ostler.workdirs.review import AcceptRequest, Review, author_of, git_identity
from ostler.workdirs.vault import NEW, Vault

T = TypeVar("T")
_THREADS = 8
_MAX_MESSAGE = 100_000
OSTLER = "Ostler <ostler@localhost>"


class Workdirs:
    def __init__(self, home: Path, seams: Seams | None = None) -> None:
        self.home = home.absolute()
        self._work = self.home / "tasks"
        #: Directories whose entries may be workdirs under another name than their key, such as those of crews.
        self._roots = {self.home / "work"}
        self._repos = self.home / "repos"
        self._seams = seams or Seams()
        self._vault = Vault(self._work, self.home / "vault", self._seams)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="workdirs")
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._running: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for what still runs."""
        while self._running:
            await asyncio.wait(self._running)
        self._pool.shutdown(wait=False)

    # --- make and look -------------------------------------------------------------------------------

    async def plan(
        self,
        key: str,
        *,
        near: Path | None,
        kind: WorkdirKind | None = None,
        target: str | None = None,
        base: str | None = None,
        place: Path | None = None,
    ) -> Workdir:
        """Decide without writing anything: a worktree when `near` is in a repository, else a directory.

        `place` is where the directory shall be; what lies beside it is taken for workdirs from now on.
        """
        planned = await self._run((), lambda: prepare.plan(self._work, check_key(key), near, kind, target, base))
        if place is None or planned.kind is not WorkdirKind.DIRECTORY:
            return planned
        self.allow(place.parent)
        return planned.evolve(path=str(place.parent / check_key(place.name)))

    def allow(self, root: Path) -> None:
        """Directories right below it may be workdirs."""
        self._roots.add(root)

    async def prepare(self, workdir: Workdir, *, fresh: bool = False) -> tuple[str, ...]:
        """Make it, or finish what a killed process began; what is there already stays. Notes for the user.

        `fresh`: what is there goes to the vault first.
        """
        place = self._place(workdir)
        return await self._on(
            self._mirror_of(workdir), lambda mirror: self._prepare(mirror, workdir, place, fresh=fresh), workdir.key
        )

    async def snapshot(self, workdir: Workdir, message: str) -> Snapshot:
        """All files as they are, the ignored ones aside, as one commit on top of the agent's own."""
        self._place(workdir)
        author = author_of(OSTLER, self._seams.clock.wall())
        return await self._on(
            self._mirror_of(workdir), lambda mirror: capture.snapshot(mirror, workdir, message, author), workdir.key
        )

    async def diff(
        self, workdir: Workdir, snapshot: Snapshot, *, paths: Sequence[str] | None = None, stat: bool = False
    ) -> str:
        """Against the merge base with the target, as text; whole or of some files, or only the numbers."""
        return await self._on(snapshot.mirror, lambda mirror: review.diff(mirror, workdir, snapshot, paths, stat=stat))

    async def changed_since_base(self, workdir: Workdir, snapshot: Snapshot) -> BaseChange:
        """How many commits the target has moved, and whether the snapshot merges into it now."""
        if workdir.repository is None:
            return BaseChange(commits=0)
        return await self._on(
            snapshot.mirror, lambda mirror: self._review(mirror, workdir).base_change(workdir, snapshot)
        )

    async def bring_target(self, workdir: Workdir) -> None:
        """Let the repository in a worktree know where the target is now, under its own name, to merge it."""
        if workdir.repository is None or workdir.target is None:
            return
        place, ref = self._place(workdir), f".git/refs/heads/{workdir.target}".encode()

        def work(mirror: Mirror) -> None:
            tip = mirror.tip(Repository.at(str(workdir.repository), mirror.held), str(workdir.target))
            with opened(place) as root, parent_of(root, ref, make=True) as (folder, name):
                replace_file(folder, name, f"{tip}\n".encode())

        await self._on(self._mirror_of(workdir), work, workdir.key)

    async def checkout(self, snapshot: Snapshot, into: Path, *, include_for: Workdir | None = None) -> None:
        """A clean checkout into a new directory. `include_for` adds what `.worktreeinclude` names."""
        source = include_for.checkout if include_for is not None else None

        def work(mirror: Mirror) -> None:
            with mirror.scratch() as scratch:
                prepare.build(mirror, into, object_id(snapshot.commit), scratch / "index")
                prepare.include(mirror, Path(source) if source else None, into, scratch / "index", self.home)

        await self._on(snapshot.mirror, work)

    async def remove(self, path: Path) -> None:
        """Delete a checkout by descriptors, never through a link."""
        place = Path(os.path.abspath(path))  # noqa: ASYNC240,PTH100 - no file is touched, and `..` must go
        kept = (self.home, self._work, self._repos, self.home / "vault")
        if any(folder.is_relative_to(place) for folder in kept) or any(
            place.is_relative_to(folder) for folder in kept[2:]
        ):
            raise InvalidOperationError(f"{place} is no checkout, so it is not removed; retire a workdir instead")
        try:
            await self._run((), lambda: remove_tree(place))
        except PermissionError as error:
            name = os.fsdecode(error.filename or b"")
            raise InvalidOperationError(f"{name} in {place} could not be removed ({error.strerror})") from error

    # --- review --------------------------------------------------------------------------------------

    async def accept(  # noqa: PLR0913 - every option of an accept is a word of its own
        self,
        workdir: Workdir,
        snapshot: Snapshot,
        *,
        paths: Sequence[str] | None = None,
        message: str,
        author: str | None = None,
        tree: str | None = None,
        branch_only: bool = False,
    ) -> Accepted:
        """Merge in memory, make one commit, move the target; conflicts are named and change nothing. Twice is safe.

        The author is the user's git identity, unless one is named. `tree` is what the merge must give, where `preview`
        was checked. Where a checkout of the target cannot follow, nothing moves (`CheckoutBlockedError`); with
        `branch_only` the branch moves and that checkout is left.
        """
        person = None if author is None else author_of(author, self._seams.clock.wall())
        if not message.strip() or len(message) > _MAX_MESSAGE:
            raise fault("message", f"must have 1 to {_MAX_MESSAGE} characters")

        def work(mirror: Mirror) -> Accepted:
            review = self._review(mirror, workdir)
            request = AcceptRequest(
                paths=paths,
                message=message,
                author=person or self._identity(review),
                tree=tree,
                branch_only=branch_only,
            )
            return review.accept(snapshot, request)

        return await self._on(snapshot.mirror, work)

    async def preview(self, workdir: Workdir, snapshot: Snapshot, paths: Sequence[str] | None = None) -> Snapshot:
        """The target as `accept` would make it, to be checked out; nothing of the user's is changed."""
        return await self._on(snapshot.mirror, lambda mirror: self._review(mirror, workdir).preview(snapshot, paths))

    async def undo(self, accepted: Accepted, *, author: str | None = None) -> Undone:
        """Set the target back, or revert by a commit where more followed or it was published. Twice is safe."""
        person = None if author is None else author_of(author, self._seams.clock.wall())

        def work(mirror: Mirror) -> Undone:
            review = self._review(mirror, accepted)
            return review.undo(accepted, person or self._identity(review))

        return await self._on(accepted.mirror, work)

    def _identity(self, review: Review) -> Author:
        return author_of(git_identity(review.repository) or OSTLER, self._seams.clock.wall())

    async def recover(self) -> list[str]:
        """Finish, in the checkouts of users, what a killed process left. What could not be finished, in sentences.

        In a home that was moved, the workdirs borrow from where their mirrors are now.
        """
        failed = []
        for place in await self._run((), self._worktrees):
            if (name := prepare.borrowed_mirror(place)) is not None and (self._repos / name).is_dir():
                await self._run((place.name,), partial(self._borrow, place, name))
        for name in sorted({journal.parent.parent.name for journal in self._repos.glob("*/follow/*.json")}):
            try:
                await self._on(name, lambda mirror: recover(mirror, self._seams.fault))
            except (OstlerError, OSError) as error:
                failed.append(f"{name}: {error}")
        return failed

    # --- vault ---------------------------------------------------------------------------------------

    async def retire(self, workdir: Workdir, *, record: Mapping[str, Any], logs: Path | None = None) -> VaultEntry:
        """Save everything, verify it, then delete the workdir. Again after a kill: it goes on."""
        self._place(workdir)
        entry = await self._run((workdir.key,), lambda: self._vault.retire(workdir, record, logs))
        await self._on(self._mirror_of(workdir), lambda mirror: mirror.forget(workdir.key))
        return entry

    async def restore(self, entry: VaultEntry, *, logs: Path | None = None) -> Workdir:
        """Bring a retired workdir back; the entry stays. `logs`: a new directory for its log."""
        workdir = await self._run((entry.key,), lambda: self._vault.restore(entry, logs))
        if workdir.kind is WorkdirKind.WORKTREE:
            place, mirror = Path(workdir.path), self._mirror_of(workdir)
            await self._run((entry.key,), lambda: self._borrow(place, mirror))
        return workdir

    async def discard(self, entry: VaultEntry) -> int:
        """Delete an entry of the vault for good; how many bytes that freed."""
        return await self._run((entry.key,), lambda: self._vault.discard(entry))

    async def list_entries(self) -> list[VaultEntry]:
        return await self._run((), self._vault.entries)

    async def find(self, key: str) -> VaultEntry | None:
        """The last entry of a key in the vault."""
        return await self._run((), lambda: self._vault.find(check_key(key)))

    async def orphans(self, keys: Collection[str]) -> list[Path]:
        """Workdirs on the disk that none of these keys owns."""
        return await self._run((), lambda: self._vault.orphans(keys))

    # --- in a thread ---------------------------------------------------------------------------------

    def _prepare(self, mirror: Mirror, workdir: Workdir, place: Path, *, fresh: bool) -> tuple[str, ...]:
        is_used = os.path.lexists(place) and (place.is_symlink() or not place.is_dir() or any(place.iterdir()))
        if fresh and (is_used or self._vault.is_half_retired(workdir)):
            self._vault.retire(workdir, {"reason": "a fresh workdir was asked for"}, None)
        if os.path.lexists(place):
            if workdir.kind is WorkdirKind.WORKTREE:
                self._borrow(place, mirror.name)
            return ()
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = place.parent / f"{NEW}{workdir.key}"
        remove_tree(part)
        notes: tuple[str, ...] = ()
        if workdir.kind is WorkdirKind.DIRECTORY:
            part.mkdir()
            part.chmod(0o755)  # whatever the umask says
        else:
            notes = prepare.make_worktree(mirror, workdir, part, self.home, self._seams.fault)
        self._seams.fault("prepare.build.after")
        self._vault.announce(workdir.key)
        part.rename(place)
        sync_folder(place.parent)
        self._seams.fault("prepare.place.after")
        return notes

    def _worktrees(self) -> list[Path]:
        folders = [folder for folder in (self._work, *self._roots) if folder.is_dir()]
        return [place for folder in folders for place in folder.iterdir() if (place / ".git").is_dir()]

    def _borrow(self, place: Path, mirror: str) -> None:
        with contextlib.suppress(OSError):  # an agent may have removed its repository
            prepare.borrow_from(place, Mirror(self._repos / mirror))

    def _review(self, mirror: Mirror, of: Workdir | Accepted) -> Review:
        return Review.of(mirror, of.repository, of.target, self._seams.fault)

    def _place(self, workdir: Workdir) -> Path:
        """Where it is by its key. A record that says otherwise came from another home, or from nowhere."""
        own, place = self._work / check_key(workdir.key), Path(workdir.path)
        if place != own and (place.parent not in self._roots or check_key(place.name) != place.name):
            raise fault("path", f"must be {own} in this home", workdir.path)
        return place

    def _mirror_of(self, workdir: Workdir) -> str:
        if workdir.repository is None or workdir.base is None:
            return PLAIN
        name = workdir.mirror or mirror_name(workdir.repository, workdir.base)
        if not (self._repos / name).is_dir() and (borrowed := prepare.borrowed_mirror(Path(workdir.path))):
            return borrowed  # a record without the name, in a home that was moved
        return name

    async def _on(self, mirror: str, work: Callable[[Mirror], T], key: str | None = None) -> T:
        """Run with a mirror that is ours alone meanwhile."""
        place = Mirror(self._repos / check_key(mirror))

        def locked() -> T:
            with place.lock() as held:
                return work(held)

        return await self._run((f"{mirror}/",) if key is None else (key, f"{mirror}/"), locked)

    async def _run(self, names: Sequence[str], work: Callable[[], T]) -> T:
        """Run in a thread, with the locks of these names. A caller may go away: what it began comes to its end, with
        its locks held until then.
        """

        async def inner() -> T:
            async with AsyncExitStack() as stack:
                for name in names:
                    await stack.enter_async_context(self._locks.setdefault(name, asyncio.Lock()))
                try:
                    return await asyncio.get_running_loop().run_in_executor(self._pool, work)
                except OSError as error:
                    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                        raise StoreFullError(f"{StoreFullError.sentence()} ({error})") from error
                    raise

        task = asyncio.ensure_future(inner())
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()
