"""`Workdirs`: plan, prepare, snapshot, diff, accept, undo, retire, restore. One object per home.

It remembers nothing: what it needs is on the disk or in the records that the caller keeps. Each verb runs in a thread
of its own pool; those of one key wait for one another, and a verb that is cancelled still comes to its end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar
from weakref import WeakValueDictionary

from ostler.errors import InvalidOperationError, OstlerError
from ostler.model.faults import fault
from ostler.seams import Seams
from ostler.workdirs import build, review
from ostler.workdirs.capture import Capture
from ostler.workdirs.files import remove_tree, sync_folder
from ostler.workdirs.follow import recover
from ostler.workdirs.git import object_id, path_text, require_version
from ostler.workdirs.mirror import PLAIN, Author, Mirror, mirror_name
from ostler.workdirs.records import (
    Accepted,
    BaseChange,
    FileChange,
    Snapshot,
    Undone,
    VaultEntry,
    Workdir,
    WorkdirKind,
    check_key,
)
from ostler.workdirs.repository import Repository, discover, head_near
from ostler.workdirs.review import Review, author_of
from ostler.workdirs.vault import NEW, Vault

T = TypeVar("T")
_THREADS = 8
_MAX_FILES = 5000
_MAX_MESSAGE = 100_000
OSTLER = "Ostler <ostler@localhost>"


class Workdirs:
    def __init__(self, home: Path, seams: Seams | None = None) -> None:
        self.home = home.absolute()
        self._work = self.home / "work"
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

    # --- verbs ---------------------------------------------------------------------------------------

    async def plan(
        self,
        key: str,
        *,
        near: Path | None,
        kind: WorkdirKind | None = None,
        target: str | None = None,
        base: str | None = None,
    ) -> Workdir:
        """Decide without writing anything: a worktree when `near` is in a repository, else a directory."""
        return await self._run(None, lambda: self._plan(check_key(key), near, kind, target, base))

    async def prepare(self, workdir: Workdir, *, fresh: bool = False) -> tuple[str, ...]:
        """Make it, or finish what a killed process began; what is there already stays. Notes for the user.

        `fresh`: what is there goes to the vault first.
        """
        place = self._place(workdir)

        def work() -> tuple[str, ...]:
            is_used = place.is_dir() and any(place.iterdir())
            if fresh and (is_used or self._vault.is_half_retired(workdir.key)):
                self._vault.retire(workdir, {"reason": "a fresh workdir was asked for"}, None)
            return self._prepare(workdir, place)

        return await self._run(workdir.key, work)

    async def snapshot(self, workdir: Workdir, message: str) -> Snapshot:
        """All files as they are, the ignored ones aside, as one commit on top of the agent's own."""
        return await self._run(workdir.key, lambda: self._snapshot(workdir, self._place(workdir), message))

    async def diff(
        self, workdir: Workdir, snapshot: Snapshot, *, paths: Sequence[str] | None = None, stat: bool = False
    ) -> str:
        def work() -> str:
            with self._mirror(snapshot.mirror).lock() as mirror:
                return review.diff(
                    mirror, self._merge_base(mirror, workdir, snapshot.commit), snapshot, paths, stat=stat
                )

        return await self._run(None, work)

    async def changed_since_base(self, workdir: Workdir, snapshot: Snapshot) -> BaseChange:
        """How many commits the target has moved, and whether the snapshot merges into it now."""
        if workdir.repository is None:
            return BaseChange(commits=0)

        def work() -> BaseChange:
            with self._review(snapshot.mirror, workdir.repository, workdir.target) as it:
                return it.base_change(workdir, snapshot)

        return await self._run(None, work)

    async def checkout(self, snapshot: Snapshot, into: Path, *, include_for: Workdir | None = None) -> None:
        """A clean checkout into a new directory. `include_for` adds what `.worktreeinclude` names."""

        def work() -> None:
            mirror = self._mirror(snapshot.mirror)
            with mirror.scratch() as scratch:
                build.build(mirror, into, object_id(snapshot.commit), scratch / "index")
                if include_for is not None and include_for.checkout is not None:
                    build.include(mirror, Path(include_for.checkout), into, scratch / "index", without=self.home)

        return await self._run(None, work)

    async def remove(self, path: Path) -> None:
        """Delete a checkout by descriptors, never through a link."""
        place = Path(os.path.abspath(path))  # noqa: ASYNC240,PTH100 - no file is touched, and `..` must go
        kept = (self.home, self._work, self._repos, self.home / "vault")
        if any(one.is_relative_to(place) for one in kept) or any(place.is_relative_to(one) for one in kept[2:]):
            raise InvalidOperationError(f"{place} is no checkout, so it is not removed; retire a workdir instead")
        await self._run(None, lambda: remove_tree(place))

    async def accept(
        self,
        workdir: Workdir,
        snapshot: Snapshot,
        *,
        paths: Sequence[str] | None = None,
        message: str,
        author: str,
    ) -> Accepted:
        """Merge in memory, make one commit, move the target; conflicts are named and change nothing. Twice is safe."""
        person = author_of(author, self._seams.clock.wall())
        if not message.strip() or len(message) > _MAX_MESSAGE:
            raise fault("message", f"must have 1 to {_MAX_MESSAGE} characters")

        def work() -> Accepted:
            with self._review(snapshot.mirror, workdir.repository, workdir.target) as it:
                return it.accept(snapshot, paths, message, person)

        return await self._run(None, work)

    async def undo(self, accepted: Accepted, *, author: str = OSTLER) -> Undone:
        """Set the target back, or revert by a commit where more followed or it was published. Twice is safe."""
        person = author_of(author, self._seams.clock.wall())

        def work() -> Undone:
            with self._review(accepted.mirror, accepted.repository, accepted.target) as it:
                return it.undo(accepted, person)

        return await self._run(None, work)

    async def retire(self, workdir: Workdir, *, record: Mapping[str, Any], logs: Path | None = None) -> VaultEntry:
        """Save everything, verify it, then delete the workdir. Again after a kill: it goes on."""

        def work() -> VaultEntry:
            self._place(workdir)
            entry = self._vault.retire(workdir, record, logs)
            mirror = self._mirror_of(workdir)
            if mirror.directory.is_dir():
                with mirror.lock() as held:
                    remove_tree(held.own(workdir.key))
                    held.tidy()
            return entry

        return await self._run(workdir.key, work)

    async def restore(self, entry: VaultEntry, *, logs: Path | None = None) -> Workdir:
        """Bring a retired workdir back; the entry stays. `logs`: a new directory for its log."""
        return await self._run(entry.key, lambda: self._vault.restore(entry, logs))

    async def list_entries(self) -> list[VaultEntry]:
        return await self._run(None, self._vault.entries)

    async def find(self, key: str) -> VaultEntry | None:
        """The last entry of a key in the vault."""
        return await self._run(None, lambda: self._vault.find(check_key(key)))

    async def orphans(self, keys: Collection[str]) -> list[Path]:
        """Workdirs on the disk that none of these keys owns."""
        return await self._run(None, lambda: self._vault.orphans(keys))

    async def recover(self) -> list[str]:
        """Finish, in the checkouts of users, what a killed process left. What could not be finished, in sentences."""
        return await self._run(None, self._recover)

    # --- in the thread -------------------------------------------------------------------------------

    def _plan(
        self, key: str, near: Path | None, kind: WorkdirKind | None, target: str | None, base: str | None
    ) -> Workdir:
        path = str(self._work / key)
        found = discover(near) if near is not None and kind is not WorkdirKind.DIRECTORY else None
        if found is None or near is None:
            if kind is WorkdirKind.WORKTREE:
                raise InvalidOperationError(
                    f"{near} is not inside a git repository; run git init there, or use a directory"
                )
            return Workdir(kind=WorkdirKind.DIRECTORY, key=key, path=path)
        require_version()
        if found.repository.directory.is_relative_to(self._work):
            raise InvalidOperationError(f"{near} is the workdir of an agent; name the repository that it came from")
        branch = target or head_near(near)
        if branch is None:
            raise InvalidOperationError(f"no branch is checked out in {near}; name the branch to merge into")
        tip = found.repository.tip(branch)
        if tip is None:
            raise InvalidOperationError(
                f"the branch {branch} of {found.repository.directory} has no commit; "
                "make a first one (git commit --allow-empty -m start), or name another branch"
            )
        commit = tip if base is None else found.repository.commit(base)
        if commit is None:
            raise fault("base", f"must name a commit in {found.repository.directory}", base)
        return Workdir(
            kind=WorkdirKind.WORKTREE,
            key=key,
            path=path,
            repository=str(found.repository.directory),
            checkout=None if found.checkout is None else str(found.checkout),
            base=commit,
            target=branch,
            branch=f"ostler/{key}",
        ).checked()

    def _prepare(self, workdir: Workdir, place: Path) -> tuple[str, ...]:
        if os.path.lexists(place):
            return ()
        self._work.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self._work / f"{NEW}{workdir.key}"
        remove_tree(part)
        notes: tuple[str, ...] = ()
        if workdir.kind is WorkdirKind.DIRECTORY:
            part.mkdir(mode=0o755)
        else:
            notes = self._build(workdir, part)
        self._seams.fault("prepare.build.after")
        self._vault.announce(workdir.key)
        part.rename(place)
        sync_folder(self._work)
        self._seams.fault("prepare.place.after")
        return notes

    def _build(self, workdir: Workdir, part: Path) -> tuple[str, ...]:
        base, repository = object_id(str(workdir.base)), str(workdir.repository)
        with self._mirror_of(workdir).lock() as mirror:
            theirs = Repository.at(repository, mirror.held)
            mirror.follow(theirs)
            mirror.take(theirs.objects, [base])
            mirror.set_ref(f"refs/ostler/{workdir.key}/base", base)
            self._seams.fault("prepare.mirror.after")
            settings = theirs.settings()
        mirror = self._mirror_of(workdir)
        own = mirror.own(workdir.key)
        build.build(mirror, part, base, own / "index", workdir.branch)
        checkout = None if workdir.checkout is None else Path(workdir.checkout)
        build.configure(part, settings, checkout or theirs.directory)
        copied: Sequence[bytes] = ()
        if checkout is not None and checkout.is_dir():
            copied = build.include(mirror, checkout, part, own / "index", without=self.home)
        build.exclude(part, copied, own / "exclude")
        return build.peculiarities(mirror, part, own / "index")

    def _snapshot(self, workdir: Workdir, place: Path, message: str) -> Snapshot:
        if not place.is_dir() or place.is_symlink():
            raise InvalidOperationError(f"the workdir {place} is not there; prepare it, or restore it from the vault")
        with self._mirror_of(workdir).lock() as mirror:
            worktree = workdir.kind is WorkdirKind.WORKTREE
            if not worktree:
                mirror.create()
            base = object_id(str(workdir.base)) if worktree else mirror.empty()
            own = mirror.own(workdir.key)
            capture = Capture(mirror, place, own / "index", own / "exclude", worktree)
            head = capture.head(base) if worktree else None
            tree = capture.tree(base)
            compared = self._merge_base(mirror, workdir, head or base)
            number, last = _last(mirror, workdir.key)
            person = author_of(OSTLER, self._seams.clock.wall())
            commit = _commit(mirror, tree, head or base, message, person, last)
            if commit != last:
                number += 1
                mirror.set_ref(f"refs/ostler/{workdir.key}/{number}", commit)
            files = _file_changes(mirror, compared, commit)
            return Snapshot(
                key=workdir.key,
                number=number,
                mirror=mirror.name,
                commit=commit,
                tree=tree,
                base=compared,
                head=head,
                files=tuple(files[:_MAX_FILES]),
                more=max(len(files) - _MAX_FILES, 0),
                left_out=tuple(capture.left_out),
            )

    def _merge_base(self, mirror: Mirror, workdir: Workdir, commit: str) -> str:
        """Where the work and its target part. Without the user's repository, as it was last seen."""
        if workdir.kind is WorkdirKind.DIRECTORY:
            return mirror.empty()
        target = str(workdir.target)
        try:
            tip: str | None = mirror.tip(Repository.at(str(workdir.repository), mirror.held), target)
        except OstlerError:
            tip = mirror.seen(target)
        return mirror.merge_base(tip or str(workdir.base), object_id(commit)) or str(workdir.base)

    @contextmanager
    def _review(self, mirror: str, repository: str | None, target: str | None) -> Iterator[Review]:
        with self._mirror(mirror).lock() as held:
            yield Review.of(held, repository, target, self._seams.fault)

    def _recover(self) -> list[str]:
        failed = []
        for journal in sorted(self._repos.glob("*/follow/*.json")):
            mirror_folder = journal.parent.parent
            try:
                with Mirror(mirror_folder).lock() as mirror:
                    recover(mirror, self._seams.fault)
            except (OstlerError, OSError) as error:
                failed.append(f"{mirror_folder.name}: {error}")
        return failed

    # --- places --------------------------------------------------------------------------------------

    def _place(self, workdir: Workdir) -> Path:
        """Where it is by its key. A record that says otherwise came from another home, or from nowhere."""
        place = self._work / check_key(workdir.key)
        if Path(workdir.path) != place:
            raise fault("path", f"must be {place} in this home", workdir.path)
        return place

    def _mirror(self, name: str) -> Mirror:
        return Mirror(self._repos / check_key(name))

    def _mirror_of(self, workdir: Workdir) -> Mirror:
        if workdir.repository is None or workdir.base is None:
            return self._mirror(PLAIN)
        return self._mirror(mirror_name(workdir.repository, workdir.base))

    # --- running -------------------------------------------------------------------------------------

    async def _run(self, key: str | None, work: Callable[[], T]) -> T:
        async def inner() -> T:
            loop = asyncio.get_running_loop()
            if key is None:
                return await loop.run_in_executor(self._pool, work)
            lock = self._locks.get(key)
            if lock is None:
                lock = self._locks[key] = asyncio.Lock()
            async with lock:
                return await loop.run_in_executor(self._pool, work)

        return await self._shielded(inner())

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """A caller may go away; what it began comes to its end, with its lock held until then."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()


def _last(mirror: Mirror, key: str) -> tuple[int, str | None]:
    """The number and the commit of the last snapshot."""
    prefix = f"refs/ostler/{key}/"
    numbered = {
        int(tail): found for name, found in mirror.refs(prefix).items() if (tail := name[len(prefix) :]).isdigit()
    }
    number = max(numbered, default=0)
    return number, numbered.get(number)


def _commit(mirror: Mirror, tree: str, parent: str, message: str, author: Author, last: str | None) -> str:
    """A commit on `parent`; the last one again where nothing has changed since."""
    if last is not None and mirror.tree_of(last) == tree and mirror.parent_of(last) == parent:
        return last
    return mirror.commit(tree, [parent], message, author)


def _file_changes(mirror: Mirror, old: str, new: str) -> list[FileChange]:
    counts = mirror.line_counts(old, new)
    found = []
    for change in mirror.changes(old, new):
        added, removed = counts.get(change.path, (None, None))
        status: Any = change.status
        found.append(FileChange(path=path_text(change.path), status=status, added=added, removed=removed))
    return found
