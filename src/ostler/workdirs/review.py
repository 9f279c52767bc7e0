"""Diff, accept and undo: an in-memory merge in the mirror, then compare-and-set of the user's branch.

Accepted work becomes one commit on the target, also where the agent made several. Before the branch moves, the commit
is noted in the mirror under its snapshot. So a second accept, also after `kill -9`, finds whether the first has moved
the branch: the noted commit is in the history of the target, or it is not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from ostler.errors import CheckoutBlockedError, ConflictError, InvalidOperationError, MergeConflictError
from ostler.failpoints import FaultPoint
from ostler.model.validation import fault
from ostler.workdirs.capture import merge_base
from ostler.workdirs.follow import Follower, Obstacle, recover
from ostler.workdirs.git import object_id, path_bytes, path_text
from ostler.workdirs.mirror import MIRROR_AUTHOR, Author, Change, Merge, Mirror
from ostler.workdirs.records import Accepted, BaseChange, Snapshot, Undone, Workdir
from ostler.workdirs.repository import Repository, require_finished

DIFF_LIMIT = 8 * 1024 * 1024
#: How often the target may move away under an accept.
_TRIES = 20
_SHOWN = 10
_AT_WORK = ("git is at work", "try again in a moment")
_AUTHOR = re.compile(r"([^<>\n\0]*[^<>\s\0]) <([^<>\s\0]*)>")


class Outcome(NamedTuple):
    followed: bool
    why_not: str | None


@dataclass(frozen=True, kw_only=True)
class AcceptRequest:
    #: None: the whole work.
    paths: Sequence[str] | None
    message: str
    author: Author
    #: The tree that the merge must give, where checks ran on it.
    tree: str | None = None
    #: Move the branch also where a checkout of it cannot follow.
    branch_only: bool = False


@dataclass(frozen=True)
class Review:
    """Everything that is done between one snapshot and its target, under the lock of the mirror."""

    mirror: Mirror
    repository: Repository
    target: str
    fault: FaultPoint

    @classmethod
    def of(cls, mirror: Mirror, repository: str | None, target: str | None, fault: FaultPoint) -> Review:
        if repository is None or target is None:
            raise InvalidOperationError(
                "a workdir of kind directory has no branch to accept into; take its files from a checkout"
            )
        theirs = Repository.at(repository, mirror.held)
        recover(mirror, fault)
        return cls(mirror, theirs, target, fault)

    def base_change(self, workdir: Workdir, snapshot: Snapshot) -> BaseChange:
        tip = self.mirror.tip(self.repository, self.target)
        merge, _ = self._merge(tip, snapshot, None)
        return BaseChange(commits=self.mirror.count(str(workdir.base), tip), conflicts=merge.conflicts)

    # --- accept --------------------------------------------------------------------------------------

    def accept(self, snapshot: Snapshot, request: AcceptRequest) -> Accepted:
        place = f"refs/ostler/{snapshot.key}/accepted/{_digest(snapshot.commit, request.paths)}"
        for _ in range(_TRIES):
            tip = self.mirror.tip(self.repository, self.target)
            earlier = self._earlier(place, tip, snapshot)
            if earlier is not None:
                merged = self.mirror.refs(f"refs/ostler/{snapshot.key}/merged/{earlier.commit}").values()
                return self._counted(earlier, snapshot, next(iter(merged), snapshot.commit))
            merge, work = self._merged(tip, snapshot, request.paths)
            if request.tree is not None and merge.tree != request.tree:
                raise ConflictError(f"{self.target} moved meanwhile, so the checks are about other files; try again")
            if self._has_all(tip, merge, work, snapshot):
                done = self._accepted(snapshot, tip, tip, Outcome(followed=True, why_not=None))
                return self._counted(done, snapshot, work)
            commit = self.mirror.commit(merge.tree, [tip], request.message, request.author)
            noted = {f"refs/ostler/{snapshot.key}/merged/{commit}": work, f"{place}/{commit[:16]}": commit}
            self.mirror.set_refs(noted)
            self.fault("review.commit.after")
            reason = f"ostler: accept {snapshot.key}"
            outcome = self._move(tip, commit, reason, branch_only=request.branch_only)
            if outcome is not None:
                return self._counted(self._accepted(snapshot, commit, tip, outcome), snapshot, work)
        raise MergeConflictError(f"{self.target} moves all the time; nothing was changed, try again in a moment")

    def preview(self, snapshot: Snapshot, paths: Sequence[str] | None) -> Snapshot:
        """What the target would be with these files, as a snapshot that can be checked out; no ref is changed."""
        tip = self.mirror.tip(self.repository, self.target)
        merge, _ = self._merged(tip, snapshot, paths)
        commit = self.mirror.commit(merge.tree, [tip], f"{snapshot.key} merged", MIRROR_AUTHOR)
        return snapshot.evolve(commit=commit, tree=merge.tree, base=tip, head=None, files=(), more=0, left_out=())

    def _merged(self, tip: str, snapshot: Snapshot, paths: Sequence[str] | None) -> tuple[Merge, str]:
        merge, work = self._merge(tip, snapshot, paths)
        if merge.conflicts:
            cure = f"send it back to its agent, or run `git merge {self.target}` in its worktree and hand it in"
            raise _conflict(f"{snapshot.key} does not merge into {self.target}", merge.conflicts, cure)
        return merge, work

    def _has_all(self, tip: str, merge: Merge, work: str, snapshot: Snapshot) -> bool:
        """Whether the target is as the merge would make it."""
        if tip == snapshot.base and work == snapshot.commit:
            return not (snapshot.files or snapshot.more)
        return merge.tree == self.mirror.tree_of(tip)

    def _counted(self, accepted: Accepted, snapshot: Snapshot, work: str) -> Accepted:
        """With the number of files of the work, and of those that the target lacks. `work` is the part that it has."""
        left = 0 if work == snapshot.commit else len(self.mirror.changes(work, snapshot.commit))
        return accepted.evolve(files=len(snapshot.files) + snapshot.more, left=left)

    def _earlier(self, place: str, tip: str, snapshot: Snapshot) -> Accepted | None:
        """The first result, if this was accepted already and not undone since."""
        for commit in self.mirror.refs(f"{place}/").values():
            if self._holds(snapshot.key, commit, tip):
                before = self.mirror.parent_of(commit)
                followers = self._followers(before, commit)
                reasons = [why for follower in followers if (why := follower.why_behind())]
                outcome = Outcome(bool(followers) and not reasons, "; ".join(reasons) or None)
                return self._accepted(snapshot, commit, before, outcome)
        return None

    def _accepted(self, snapshot: Snapshot, commit: str, before: str, outcome: Outcome) -> Accepted:
        return Accepted(
            key=snapshot.key,
            mirror=self.mirror.name,
            repository=str(self.repository.directory),
            target=self.target,
            commit=commit,
            before=before,
            followed=outcome.followed,
            why_not_followed=outcome.why_not,
        )

    def _merge(self, tip: str, snapshot: Snapshot, paths: Sequence[str] | None) -> tuple[Merge, str]:
        """The target with the work, and the commit that stands for the work."""
        has_moved = tip != snapshot.base  # which the work has in its history
        common = (self.mirror.merge_base(tip, object_id(snapshot.commit)) if has_moved else tip) or snapshot.base
        base = self._last_merged(tip, snapshot.key, common)
        work = snapshot.commit if paths is None else self._only(base, snapshot, paths)
        if work == snapshot.commit and base == common == tip:
            return Merge(object_id(snapshot.tree), ()), work  # the target has nothing that the work lacks
        return (self.mirror.merge(tip, work) if base == common else self.mirror.merge_on(base, tip, work)), work

    def _last_merged(self, tip: str, key: str, common: str) -> str:
        """The last part of this work that the target has already, or `common`. What the agent did since is merged from
        there: an accepted commit is not in the agent's history, and the same lines would seem to be changed twice.
        """
        last, work = common, common
        prefix = f"refs/ostler/{key}/merged/"
        for name, candidate in self.mirror.refs(prefix).items():
            commit = name.removeprefix(prefix)
            if self._holds(key, commit, tip) and self.mirror.is_ancestor(last, commit):
                last, work = commit, candidate
        return work

    def _holds(self, key: str, commit: str, tip: str) -> bool:
        return self.mirror.is_ancestor(commit, tip) and self._reverted(key, commit, tip) is None

    def _only(self, base: str, snapshot: Snapshot, paths: Sequence[str]) -> str:
        """A commit on `base` that has only the changes of these paths, or of what is below them."""
        chosen = _chosen(self.mirror.changes(base, snapshot.commit), paths, snapshot.key)
        with self.mirror.scratch() as scratch:
            git = self.mirror.git.with_(index=scratch / "index")
            git.run("read-tree", base)
            # What goes makes room before what comes: a file may become a directory.
            lines = [b"0 %s\t%s" % (b"0" * len(base), change.path) for change in chosen if change.status == "D"]
            lines += [
                b"%s %s\t%s" % (change.new_mode, change.new.encode(), change.path)
                for change in chosen
                if change.status != "D"
            ]
            git.run("update-index", "-z", "--index-info", stdin=b"\0".join([*lines, b""]))
            return self.mirror.commit(git.text("write-tree"), [base], "chosen files", MIRROR_AUTHOR)

    # --- undo ----------------------------------------------------------------------------------------

    def undo(self, accepted: Accepted, author: Author) -> Undone:
        commit, before = object_id(accepted.commit), object_id(accepted.before)
        for _ in range(_TRIES):
            tip = self.mirror.tip(self.repository, self.target)
            done = self._reverted(accepted.key, commit, tip)
            if commit == before or done or not self.mirror.is_ancestor(commit, tip):
                return Undone(target=self.target, commit=tip, before=tip, reverted=bool(done), followed=True)
            back = tip == commit and not self.repository.published(commit)
            new = before if back else self._reverting(tip, accepted, author)
            outcome = self._move(tip, new, f"ostler: undo {accepted.key}", branch_only=True, is_undo=True)
            if outcome is not None:
                return Undone(
                    target=self.target,
                    commit=new,
                    before=tip,
                    reverted=not back,
                    followed=outcome.followed,
                    why_not_followed=outcome.why_not,
                )
        raise MergeConflictError(f"{self.target} moves all the time; nothing was changed, try again in a moment")

    def _reverting(self, tip: str, accepted: Accepted, author: Author) -> str:
        """A commit on the tip without the changes of the accepted one: merged as if its inverse had been made on it."""
        inverse = self.mirror.commit(self.mirror.tree_of(accepted.before), [accepted.commit], "inverse", MIRROR_AUTHOR)
        merge = self.mirror.merge(tip, inverse)
        if merge.conflicts:
            what = f"{accepted.key} cannot be undone on {self.target}, for later work builds on it"
            raise _conflict(what, merge.conflicts, "undo that first, or change the files by hand")
        message = f"Undo {accepted.key}\n\nThis reverts commit {accepted.commit}."
        commit = self.mirror.commit(merge.tree, [tip], message, author)
        self.mirror.set_ref(f"refs/ostler/{accepted.key}/undone/{accepted.commit}/{commit[:16]}", commit)
        return commit

    def _reverted(self, key: str, commit: str, tip: str) -> str | None:
        """The reverting commit of ours that is in the history of the target."""
        noted = self.mirror.refs(f"refs/ostler/{key}/undone/{commit}/").values()
        return next((commit for commit in noted if self.mirror.is_ancestor(commit, tip)), None)

    # --- the branch ----------------------------------------------------------------------------------

    def _move(self, old: str, new: str, reason: str, *, branch_only: bool, is_undo: bool = False) -> Outcome | None:
        """Compare and set, and let the checkouts follow. None when the target was moved meanwhile.

        With `branch_only` a checkout that cannot follow is left as it is; else nothing moves.
        """
        followers = self._followers(old, new, is_undo=is_undo)
        for follower in followers:
            require_finished(follower.checkout, self.target)
        locked = [follower for follower in followers if follower.begin(self.target)]
        moved = False
        try:
            if not branch_only:
                self._require_free(followers, locked)
            self.mirror.give(new, old, self.repository.objects)
            self.fault("review.objects.after")
            self.fault("review.ref.before")
            moved = self.repository.move(self.target, new, old, reason)
        finally:
            if not moved:
                for follower in locked:
                    follower.cancel()
        if not moved:
            return None
        self.fault("review.ref.after")
        reasons = [
            f"git is at work in {follower.checkout.path}, so its files were left as they are"
            for follower in followers
            if follower not in locked
        ]
        reasons += [why for follower in locked if (why := follower.finish())]
        return Outcome(bool(followers) and not reasons, "; ".join(reasons) or None)

    def _require_free(self, followers: Sequence[Follower], locked: Sequence[Follower]) -> None:
        """Refuse, as git does, where a checkout could not follow the branch as a whole."""
        for follower in followers:
            obstacle = follower.obstacle() if follower in locked else Obstacle((), *_AT_WORK)
            if obstacle is not None:
                raise CheckoutBlockedError(
                    f"{self.target} is checked out in {follower.checkout.path}, and there {obstacle.sentence}; "
                    f"{obstacle.remedy}. Nothing was changed",
                    paths=obstacle.paths,
                )

    def _followers(self, before: str, after: str, *, is_undo: bool = False) -> list[Follower]:
        return [
            Follower(
                mirror=self.mirror,
                repository=self.repository,
                checkout=checkout,
                before=before,
                after=after,
                fault=self.fault,
                is_undo=is_undo,
            )
            for checkout in self.repository.checkouts(self.target)
        ]


def author_of(text: str, when: datetime) -> Author:
    match = _AUTHOR.fullmatch(text)
    if match is None:
        raise fault("author", "must look like Ada Lovelace <ada@example.org>", text)
    return Author(match[1], match[2], when)


def git_identity(repository: Repository) -> str | None:
    """Who the user is to git in this repository, as an author; None where git would have to ask."""
    settings = dict(repository.settings)
    name, email = (settings.get(f"author.{part}") or settings.get(f"user.{part}") for part in ("name", "email"))
    text = f"{name} <{email}>"
    return text if name and email and _AUTHOR.fullmatch(text) else None


def diff(mirror: Mirror, workdir: Workdir, snapshot: Snapshot, paths: Sequence[str] | None, *, stat: bool) -> str:
    """The text of a diff. No external program, text conversion or colour; attributes of the work are not read."""
    form = ["--stat=120", "--summary"] if stat else ["--patch"]
    chosen = [path_bytes(path) for path in paths or ()]
    base = merge_base(mirror, workdir, object_id(snapshot.commit))
    how = ("--no-color", "--no-ext-diff", "--no-textconv", "--find-renames", "--submodule=short")
    answer = mirror.git.ask("diff", *how, *form, base, object_id(snapshot.commit), "--", *chosen, cut_at=DIFF_LIMIT)
    text = answer.output.decode("utf-8", "replace")
    return (
        text if len(answer.output) < DIFF_LIMIT else f"{text}\n(the diff goes on; name fewer files to see the rest)\n"
    )


def _chosen(changes: Sequence[Change], paths: Sequence[str], key: str) -> list[Change]:
    chosen = [path_bytes(path).rstrip(b"/") for path in paths]
    unknown = [
        path_text(path)
        for path in chosen
        if not any(change.path == path or change.path.startswith(path + b"/") for change in changes)
    ]
    if unknown or not chosen:
        names = ", ".join(unknown[:_SHOWN]) or "no file"
        raise InvalidOperationError(f"{key} does not change {names}; see its diff for what it changes")
    return [
        change
        for change in changes
        if any(change.path == path or change.path.startswith(path + b"/") for path in chosen)
    ]


def _conflict(what: str, paths: Sequence[str], cure: str) -> MergeConflictError:
    names = ", ".join(paths[:_SHOWN]) + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")
    return MergeConflictError(f"{what}: conflicts in {names}. Nothing was changed; {cure}", paths=paths)


def _digest(commit: str, paths: Sequence[str] | None) -> str:
    chosen = "*" if paths is None else "\0".join(sorted(set(paths)))
    return hashlib.sha256(f"{commit}\0{chosen}".encode("utf-8", "surrogateescape")).hexdigest()[:16]
