"""What the mirror reads by itself is what git reads there."""

from __future__ import annotations

from pathlib import Path

import pytest
from workdirs_ground import commit_all, git, make_repository

from ostler.workdirs.mirror import Mirror
from ostler.workdirs.repository import Repository, discover


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "repository")


@pytest.fixture
def mirror(tmp_path: Path, repository: Path) -> Mirror:
    mirror = Mirror(tmp_path / "mirror")
    mirror.follow(Repository.at(str(repository / ".git")))
    return mirror


def refs_of_git(mirror: Mirror, prefix: str) -> dict[str, str]:
    listing = mirror.git.text("for-each-ref", "--format=%(refname) %(objectname)", prefix)
    return dict(line.split(" ") for line in listing.splitlines())


def test_refs_are_those_that_git_lists(mirror: Mirror, repository: Path) -> None:
    first = git(repository, "rev-parse", "HEAD").strip()
    git(repository, "tag", "--annotate", "--message=one", "v1")
    git(repository, "branch", "main-two/ä")
    mirror.follow(Repository.at(str(repository / ".git")))
    mirror.set_refs({"refs/ostler/T1/1": first, "refs/ostler/T10/1": first, "refs/ostler/T1/merged/x": first})
    mirror.git.run("pack-refs", "--all")
    second = commit_all_of(repository)
    mirror.follow(Repository.at(str(repository / ".git")), {"refs/ostler/T1/base": second})
    mirror.set_ref("refs/ostler/T1/1", second)
    (mirror.directory / "refs" / "ostler" / "T1" / "cut-off").write_text("")
    (mirror.directory / "refs" / "ostler" / "T1" / "2.lock").write_text(f"{second}\n")
    for prefix in ("refs/", "refs/user/", "refs/user/heads/main", "refs/ostler/T1/", "refs/ostler/T1/merged/x"):
        assert mirror.refs(prefix) == refs_of_git(mirror, prefix)
    assert mirror.refs("refs/ostler/T1/")["refs/ostler/T1/1"] == second
    assert mirror.refs("refs/ostler/T1/")["refs/ostler/T1/base"] == second
    assert mirror.refs("refs/ostler/T404/") == {}


def commit_all_of(repository: Path) -> str:
    (repository / "a.txt").write_text("one\n2\n3\nfour\n")
    (repository / "b.txt").unlink()
    (repository / "odd\tna\nme").write_bytes(b"\0\1")
    return commit_all(repository)


def test_changes_with_their_lines_in_one_call(mirror: Mirror, repository: Path) -> None:
    first = git(repository, "rev-parse", "HEAD").strip()
    second = commit_all_of(repository)
    mirror.follow(Repository.at(str(repository / ".git")))
    counted = mirror.counted_changes(first, second)
    assert [change for change, _, _ in counted] == mirror.changes(first, second)
    lines = {change.path: (change.status, added, removed) for change, added, removed in counted}
    assert lines == {b"a.txt": ("M", 3, 2), b"b.txt": ("D", 0, 1), b"odd\tna\nme": ("A", None, None)}
    assert mirror.counted_changes(second, second) == []


def test_a_place_is_found_below_a_checkout_and_in_a_bare_repository(tmp_path: Path, repository: Path) -> None:
    inside = discover(repository / "sub")
    assert inside is not None
    assert (inside.repository.directory, inside.checkout) == (repository / ".git", repository)
    git(tmp_path, "clone", "--quiet", "--bare", str(repository), "bare.git")
    bare = discover(tmp_path / "bare.git")
    assert bare is not None
    assert (bare.repository.directory, bare.checkout) == (tmp_path / "bare.git", None)
    git(repository, "worktree", "add", "--quiet", str(tmp_path / "second\nplace"), "-b", "second")
    second = discover(tmp_path / "second\nplace")
    assert second is not None
    assert (second.repository.directory, second.checkout) == (repository / ".git", tmp_path / "second\nplace")
    assert discover(tmp_path) is None
