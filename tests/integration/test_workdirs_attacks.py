"""What an agent may try: cases 1 to 9 of the attack list, each with its refusal."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import tarfile
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from workdirs_ground import Ground, commit_all, git, make_repository, plant, tree_of

from ostler.errors import InvalidOperationError, OstlerError, StoreFullError, ValidationError, VaultError
from ostler.workdirs import Workdirs, files
from ostler.workdirs.archive import Item, check
from ostler.workdirs.files import remove_tree
from ostler.workdirs.mirror import Mirror

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ground(tmp_path: Path) -> AsyncIterator[Ground]:
    repository = make_repository(tmp_path / "user")
    async with Workdirs(tmp_path / "home") as workdirs:
        yield Ground(repository, tmp_path / "home", workdirs)


# --- 1, 2: links -------------------------------------------------------------------------------------


async def test_links_to_a_secret_are_kept_as_links_everywhere(ground: Ground, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("canary-4711")
    workdir, place = await ground.prepared()
    (place / "to-file").symlink_to(secret / "key")
    (place / "to-folder").symlink_to(secret)
    (place / "b.txt").unlink()
    (place / "b.txt").symlink_to(secret / "key")
    (place / "sub" / "c.txt").unlink()
    (place / "sub").rmdir()
    (place / "sub").symlink_to(secret)
    (place / ".gitignore").symlink_to(secret / "key")
    snapshot = await ground.workdirs.snapshot(workdir, "one")
    diff = await ground.workdirs.diff(workdir, snapshot)
    assert "canary" not in diff
    assert f"+{secret}" in diff
    entry = await ground.workdirs.retire(workdir, record={}, logs=None)
    with tarfile.open(Path(entry.path) / "archive.tar.gz") as archive:
        names = archive.getnames()
        assert archive.getmember("work/to-folder").issym()
    assert not [name for name in names if name.startswith(("work/to-folder/", "work/sub/"))]
    assert b"canary" not in gzip.decompress((Path(entry.path) / "archive.tar.gz").read_bytes())
    assert (secret / "key").read_text() == "canary-4711"


async def test_a_workdir_that_became_a_link_is_not_followed(ground: Ground, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("stays\n")
    workdir, place = await ground.prepared()
    place.rename(tmp_path / "moved")
    place.symlink_to(outside)
    with pytest.raises(InvalidOperationError, match="is not there"):
        await ground.workdirs.snapshot(workdir, "one")
    entry = await ground.workdirs.retire(workdir, record={})
    assert entry.left_out == ("the workdir itself: it was no directory any more",)
    assert not place.is_symlink()
    assert (outside / "file").read_text() == "stays\n"


async def test_flipping_a_directory_and_a_link_changes_nothing_outside(ground: Ground, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for number in range(20):
        (outside / f"f{number}").write_text("canary\n")
    before = tree_of(outside)
    flips = [0]
    rounds = 0
    while rounds < 3 or flips[0] < 1000:
        rounds += 1
        workdir, place = await ground.prepared(f"T{rounds}")
        (place / "real").mkdir()
        (place / "real" / "f0").write_text("inside\n")
        done = threading.Event()
        flipper = threading.Thread(target=_flip, args=(place, outside, done, flips))
        flipper.start()
        try:
            for _ in range(4):
                try:
                    snapshot = await ground.workdirs.snapshot(workdir, "one")
                    assert "canary" not in await ground.workdirs.diff(workdir, snapshot)
                    entry = await ground.workdirs.retire(workdir, record={})
                    assert b"canary" not in gzip.decompress((Path(entry.path) / "archive.tar.gz").read_bytes())
                    break
                except OstlerError:
                    continue
        finally:
            done.set()
            flipper.join()
        assert tree_of(outside) == before


def _flip(place: Path, outside: Path, done: threading.Event, flips: list[int]) -> None:
    """Through a descriptor, so that it goes on wherever the workdir is moved to."""
    root = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        while not done.is_set():
            flips[0] += 1
            try:
                os.rename("real", "hidden", src_dir_fd=root, dst_dir_fd=root)
                os.symlink(outside, "real", dir_fd=root)
                os.unlink("real", dir_fd=root)
                os.rename("hidden", "real", src_dir_fd=root, dst_dir_fd=root)
            except OSError:
                pass
    finally:
        os.close(root)


class Flips:
    """Puts a link to `outside` in the place of `inside`, right after the given call of the system."""

    def __init__(self, inside: Path, outside: Path, real: Callable[..., Any]) -> None:
        self._inside, self._outside, self._real = inside, outside, real
        self.flipped = False

    def __call__(self, name: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return self._real(name, *arguments, **options)
        finally:
            if not self.flipped and name == os.fsencode(self._inside.name):
                self._inside.rename(self._inside.with_name("hidden"))
                self._inside.symlink_to(self._outside)
                self.flipped = True


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("canary\n")
    folder = tmp_path / "root" / "folder"
    folder.mkdir(parents=True)
    (folder / "file").write_text("inside\n")
    return folder


def test_a_link_that_takes_the_place_of_a_directory_is_not_walked_into(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flips = Flips(inside, tmp_path / "outside", os.stat)
    with files.opened(inside.parent) as root:
        monkeypatch.setattr(os, "stat", flips)
        found = {one.path for one in files.walk(root)}
    assert flips.flipped
    assert found == {b"folder"}


def test_a_link_that_takes_the_place_of_a_directory_is_not_emptied(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flips = Flips(inside, tmp_path / "outside", os.unlink)
    monkeypatch.setattr(os, "unlink", flips)
    remove_tree(inside.parent)
    assert flips.flipped
    assert not inside.parent.exists()
    assert (tmp_path / "outside" / "file").read_text() == "canary\n"


def test_a_link_that_takes_the_place_of_a_file_is_not_read(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "copy").mkdir()
    flips = Flips(inside / "file", tmp_path / "outside" / "file", os.stat)
    with files.opened(inside) as root, files.opened(tmp_path / "copy") as target:
        monkeypatch.setattr(os, "stat", flips)
        with pytest.raises(OSError, match="symbolic links"):
            files.copy(root, b"file", target, 1000)
    assert flips.flipped
    assert not list((tmp_path / "copy").iterdir())


@pytest.mark.parametrize("path", [b"../x", b"/x", b"a//b", b"a/./b", b"", b"a/", b"folder/../x"])
def test_only_plain_paths_lead_into_a_workdir(inside: Path, path: bytes) -> None:
    with (
        files.opened(inside.parent) as root,
        pytest.raises(InvalidOperationError, match="not a path inside"),
        files.parent_of(root, path),
    ):
        pass


def test_no_way_into_a_workdir_leads_through_a_link(inside: Path, tmp_path: Path) -> None:
    (inside / "away").symlink_to(tmp_path / "outside")
    with files.opened(inside.parent) as root:
        assert files.status(root, b"folder/file") is not None
        assert files.status(root, b"folder/away/file") is None
        assert files.read_small(root, b"folder/away/file", 100) is None
    with pytest.raises(OSError, match="Not a directory"), files.opened(inside / "away"):
        pass


def test_a_very_deep_tree_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "deep"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(700):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    remove_tree(top)
    assert not top.exists()


# --- 3: names (keys are in the contract) -------------------------------------------------------------


@pytest.mark.parametrize("name", [".git", ".GIT", "git~1", ".git ", ".Git.", "sub\\.git"])
async def test_names_that_stand_for_a_repository_are_left_out(ground: Ground, name: str) -> None:
    workdir, place = await ground.prepared()
    nested = place / "inner"
    nested.mkdir()
    (nested / name).write_text("[core]\n")
    (place / "a.txt").write_text("agent\n")
    snapshot = await ground.workdirs.snapshot(workdir, "one")
    assert [change.path for change in snapshot.files] == ["a.txt"]
    assert (await ground.accept(workdir, snapshot)).followed
    assert not (ground.repository / "inner").exists()


# --- 4: nothing is lost ------------------------------------------------------------------------------


async def test_work_that_was_never_pushed_or_committed_is_in_the_vault(ground: Ground) -> None:
    workdir, place = await ground.prepared()
    (place / "a.txt").write_text("committed\n")
    commit = commit_all(place, "only here")
    (place / "b.txt").write_text("staged\n")
    git(place, "add", "b.txt")
    (place / "b.txt").write_text("not staged\n")
    (place / "new.txt").write_text("untracked\n")
    git(place, "branch", "aside")
    before = tree_of(place)
    entry = await ground.workdirs.retire(workdir, record={})
    await ground.workdirs.restore(entry)
    assert tree_of(place) == before
    assert git(place, "rev-parse", "aside").strip() == commit
    assert git(place, "show", ":b.txt") == "staged\n"
    assert git(place, "status", "--porcelain").splitlines() == ["MM b.txt", "?? new.txt"]
    git(place, "fsck", "--strict")


async def test_what_cannot_be_saved_is_not_deleted(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    workdir, place = await ground.prepared()
    before = tree_of(place)
    monkeypatch.setattr("ostler.workdirs.archive.MAX_ENTRIES", 3)
    with pytest.raises(InvalidOperationError, match="more than 3 files"):
        await ground.workdirs.retire(workdir, record={})
    assert tree_of(place) == before
    assert not await ground.workdirs.list_entries()


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (
            PermissionError(13, "denied", b"a.txt"),
            InvalidOperationError,
            r"a\.txt of T1 may not be read; make it readable",
        ),
        (OSError(28, "No space left on device"), StoreFullError, "No space left"),
    ],
)
async def test_what_cannot_be_read_or_written_keeps_the_workdir(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, error: OSError, raised: type[Exception], said: str
) -> None:
    def refuse(*_: object) -> None:
        raise error

    workdir, place = await ground.prepared()
    before = tree_of(place)
    with monkeypatch.context() as patch:
        patch.setattr("ostler.workdirs.vault.pack", refuse)
        with pytest.raises(raised, match=said):
            await ground.workdirs.retire(workdir, record={})
    assert tree_of(place) == before
    assert not (await ground.workdirs.retire(workdir, record={})).missing


async def test_what_changes_while_it_is_saved_is_saved_again(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    workdir, place = await ground.prepared()
    aside = place.with_name(".retired-T1-1")
    calls = []

    def check_late(*arguments: Any) -> None:
        check(*arguments)
        calls.append(1)
        if len(calls) in changed_after:
            (aside / "a.txt").write_text(f"late {len(calls)}\n")

    monkeypatch.setattr("ostler.workdirs.vault.check", check_late)
    changed_after = range(1, 100)
    with pytest.raises(InvalidOperationError, match="still being changed"):
        await ground.workdirs.retire(workdir, record={})
    assert (place / "a.txt").read_text() == "late 3\n"
    calls.clear()
    changed_after = range(1, 2)
    entry = await ground.workdirs.retire(workdir, record={})
    assert len(calls) == 2
    await ground.workdirs.restore(entry)
    assert (place / "a.txt").read_text() == "late 1\n"


# --- 5, 6, 7: programs -------------------------------------------------------------------------------


async def test_no_program_of_an_agent_runs_in_our_calls_nor_in_the_users_checkout(
    ground: Ground, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    workdir, place = await ground.prepared()
    plant(place, canary)
    git(place, "status", check=False)
    assert canary.exists(), "what was planted must bite where the agent itself runs git"
    (place / "a.txt").write_text("agent\n")
    nested = make_repository(place / "nested", {"n": "n\n"})
    plant(nested, canary)
    canary.unlink()
    snapshot = await ground.workdirs.snapshot(workdir, "one")
    await ground.workdirs.diff(workdir, snapshot)
    await ground.workdirs.diff(workdir, snapshot, stat=True)
    await ground.workdirs.changed_since_base(workdir, snapshot)
    (ground.repository / "b.txt").write_text("moved\n")
    git(ground.repository, "commit", "--quiet", "--all", "--message=moved")
    accepted = await ground.accept(workdir, snapshot, ["a.txt", "nested"])
    whole = await ground.accept(workdir, snapshot)
    await ground.workdirs.undo(accepted)
    await ground.workdirs.undo(whole)
    await ground.workdirs.checkout(snapshot, ground.home / "proof", include_for=workdir)
    entry = await ground.workdirs.retire(workdir, record={})
    await ground.workdirs.restore(entry)
    await ground.workdirs.snapshot(workdir, "two")
    for arguments in (["status"], ["diff"], ["log", "-p"], ["gc", "--quiet"], ["stash"], ["checkout", "-q", "-b", "x"]):
        ground.git(*arguments)
    assert not canary.exists(), canary.read_text()


async def test_no_program_of_the_users_repository_runs_in_our_calls(ground: Ground, tmp_path: Path) -> None:
    """It may have been written there by an agent that was not shut in."""
    canary = tmp_path / "canary"
    workdir, snapshot = await ground.changed(a_txt="agent\n")
    plant(ground.repository, canary)
    config = ground.repository / ".git" / "config"
    kept = config.read_text().partition("[remote")[0]  # a partial clone is refused for another reason
    config.write_text(kept)
    canary.unlink(missing_ok=True)
    accepted = await ground.accept(workdir, snapshot, branch_only=True)
    await ground.workdirs.undo(accepted)
    other, _ = await ground.prepared("T2")
    await ground.workdirs.snapshot(other, "x")
    assert not canary.exists(), canary.read_text()


@pytest.mark.parametrize("lie", ["missing", "another tree under its name"])
async def test_lies_in_the_agents_objects_are_not_believed(ground: Ground, lie: str) -> None:
    """A commit that cannot be read whole is left; the files count."""
    workdir, place = await ground.prepared()
    (place / "a.txt").write_text("first\n")
    commit_all(place)
    (place / "a.txt").write_text("agent\n")
    head = commit_all(place)
    tree, other = (loose(place, f"{name}^{{tree}}") for name in ("HEAD", "HEAD~1"))
    tree.unlink()
    if lie != "missing":
        tree.write_bytes(other.read_bytes())
    snapshot = await ground.workdirs.snapshot(workdir, "one")
    assert snapshot.head is None
    assert any("cannot be read" in told for told in snapshot.left_out)
    assert [change.path for change in snapshot.files] == ["a.txt"]
    mirror = Mirror(ground.home / "repos" / snapshot.mirror)
    assert head not in mirror.git.text("rev-list", "--all")
    mirror.git.run("fsck", "--connectivity-only")


def loose(place: Path, name: str) -> Path:
    found = git(place, "rev-parse", name).strip()
    return place / ".git" / "objects" / found[:2] / found[2:]


@pytest.mark.parametrize(
    "head", ["ref: refs/heads/../../../../etc/passwd", "ref: ../x", "x" * 5000, "ref: refs/heads/-x"]
)
async def test_a_head_that_points_elsewhere_is_not_read(ground: Ground, head: str) -> None:
    workdir, place = await ground.prepared()
    (place / ".git" / "HEAD").write_text(head)
    snapshot = await ground.workdirs.snapshot(workdir, "one")
    assert snapshot.head is None


@pytest.mark.parametrize(
    "name", ["-x", "--upload-pack=touch x", "ext::sh -c date", "x\ry", "a..b", "@{-1}", "main:a.txt"]
)
async def test_names_that_git_could_take_for_options_are_refused(ground: Ground, name: str) -> None:
    with pytest.raises(InvalidOperationError, match="has no commit"):
        await ground.workdirs.plan("T1", near=ground.repository, target=name)
    if name != "@{-1}":
        with pytest.raises(ValidationError, match="base must name a commit"):
            await ground.workdirs.plan("T1", near=ground.repository, base=name)


async def test_a_commit_in_a_record_is_nothing_but_a_commit(ground: Ground) -> None:
    workdir, snapshot = await ground.changed(a_txt="agent\n")
    for text in ("--output=x", "HEAD", "main", snapshot.commit[:12]):
        with pytest.raises(ValidationError, match="full name of an object"):
            await ground.workdirs.diff(workdir, snapshot.evolve(commit=text))
    with pytest.raises(ValidationError, match="key must be"):
        await ground.workdirs.diff(workdir, snapshot.evolve(mirror="../../x"))


# --- 8: settings in a workdir ------------------------------------------------------------------------


async def test_no_settings_are_read_from_a_workdir(ground: Ground) -> None:
    (ground.repository / "x.env").write_text("secret of the user\n")
    (ground.repository / ".git" / "info" / "exclude").write_text("*.env\n")
    workdir, place = await ground.prepared()
    for name in (".worktreeinclude", ".gitconfig", ".mcp.json", ".env"):
        (place / name).write_text("*.env\n")
    (place / ".claude").mkdir()
    (place / ".claude" / "settings.json").write_text("{}")
    (place / ".git" / "info" / "exclude").write_text("*\n")
    snapshot = await ground.workdirs.snapshot(workdir, "one")
    assert {change.path for change in snapshot.files} == {
        ".worktreeinclude",
        ".gitconfig",
        ".mcp.json",
        ".claude/settings.json",
    }
    await ground.workdirs.checkout(snapshot, ground.home / "proof", include_for=workdir)
    assert not (ground.home / "proof" / "x.env").exists()


# --- 9: archives -------------------------------------------------------------------------------------


def member(
    name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", link: str = "", size: int | None = None
) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = len(data) if size is None else size
    return info.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % 512)


WORK = member("work", tarfile.DIRTYPE)
GIB = 1024**3
#: By name: the archive, and what must be said of it.
ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "dots": (lambda: WORK + member("work/../../x", data=b"x"), "not a plain path"),
    "absolute": (lambda: WORK + member("/etc/x", data=b"x"), "not a plain path"),
    "outside": (lambda: member("other", tarfile.DIRTYPE), "outside work and logs"),
    "symlink then write": (
        lambda: WORK + member("work/a", tarfile.SYMTYPE, link="/etc") + member("work/a/x", data=b"x"),
        "does not lie in a directory",
    ),
    "top is a link": (lambda: member("work", tarfile.SYMTYPE, link="/etc"), "outside work and logs"),
    "hard link": (lambda: WORK + member("work/a", tarfile.LNKTYPE, link="/etc/passwd"), "neither a file"),
    "device": (lambda: WORK + member("work/a", tarfile.CHRTYPE), "neither a file"),
    "fifo": (lambda: WORK + member("work/a", tarfile.FIFOTYPE), "neither a file"),
    "sparse": (lambda: WORK + member("work/a", tarfile.GNUTYPE_SPARSE), "neither a file"),
    "twice": (lambda: WORK + member("work/a", data=b"x") + member("work/a", data=b"y"), "comes twice"),
    "no parent": (lambda: WORK + member("work/a/b", data=b"x"), "does not lie in a directory"),
    "empty part": (lambda: WORK + member("work//a", data=b"x"), "not a plain path"),
    "dot": (lambda: WORK + member("work/./a", data=b"x"), "not a plain path"),
    "bomb": (lambda: WORK + member("work/a", size=10 * GIB), "more than 15 entries or"),
    "header of a gigabyte": (lambda: WORK + member("work/a", tarfile.XHDTYPE, size=GIB), "header of more than 1 MiB"),
    "negative size": (lambda: WORK + negative(), "neither a file|points back"),
    "link with contents": (lambda: WORK + member("work/a", tarfile.SYMTYPE, data=b"x", link="b"), "neither a file"),
    "cut off": (lambda: WORK + member("work/a", data=b"x" * 1000)[:900], "cannot be read"),
    "too many entries": (
        lambda: WORK + b"".join(member(f"work/{number}", tarfile.DIRTYPE) for number in range(20)),
        "more than 15 entries",
    ),
}


def negative() -> bytes:
    header = bytearray(member("work/a"))
    header[124:136] = b"\xff" * 12  # -1 in base 256
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header[:512])
    return bytes(header)


@pytest.mark.parametrize("name", ARCHIVES)
async def test_a_hostile_archive_is_refused_before_the_first_write(
    ground: Ground, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir, place = await ground.prepared()
    entry = await ground.workdirs.retire(workdir, record={})
    archive = Path(entry.path) / "archive.tar.gz"
    make, said = ARCHIVES[name]
    archive.write_bytes(gzip.compress(make() + bytes(0 if name == "cut off" else 1024), compresslevel=1))
    with pytest.raises(VaultError, match="changed since it was made"):
        await ground.workdirs.restore(entry)
    monkeypatch.setattr("ostler.workdirs.archive.MAX_ENTRIES", 15)
    monkeypatch.setattr("ostler.workdirs.archive._allowed", lambda *_: 8 * GIB)
    monkeypatch.setattr("ostler.workdirs.vault._file_digest", lambda _: forged(entry.path))
    with pytest.raises(VaultError, match=f"({said}).*nothing was unpacked"):
        await ground.workdirs.restore(entry)
    assert not list((ground.home / "tasks").iterdir())
    assert not place.exists()


def forged(path: str) -> str:
    """The digest that the manifest has, as if the archive were the right one."""
    head = (Path(path) / "manifest.jsonl").read_text().splitlines()[0]
    return head.partition('"archive": "')[2].partition('"')[0]


def test_an_archive_that_says_what_its_manifest_says_passes() -> None:
    data = gzip.compress(WORK + member("work/a", data=b"x") + bytes(1024))
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    items = [Item("work", "folder", 0o644, 0, ""), Item("work/a", "file", 0o644, 1, digest)]
    check(io.BytesIO(data), items)
    for wrong in ([items[0]], [*items, items[1]], [items[0], items[1]._replace(mode=0o755)]):
        with pytest.raises(VaultError, match="nothing was unpacked"):
            check(io.BytesIO(data), wrong)


async def test_an_entry_that_was_tampered_with_is_refused(ground: Ground) -> None:
    workdir, place = await ground.prepared()
    entry = await ground.workdirs.retire(workdir, record={})
    manifest = Path(entry.path) / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes().replace(b"work/a.txt", b"work/z.txt"))
    with pytest.raises(VaultError, match="was changed since it was made"):
        await ground.workdirs.restore(entry)
    manifest.write_text("not json")
    assert not await ground.workdirs.list_entries()
    assert not place.exists()


# --- pipes, sparse files, files that stay -------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        ".gitignore",
        ".gitattributes",
        ".gitmodules",
        "sub/.gitignore",
        "sub/.gitattributes",
        "anywhere",
        ".git/index",
        ".git/packed-refs",
        ".git/objects/info/alternates",
        ".git/objects/pack/pack-0.idx",
        "inner/.git/HEAD",
        "inner/.git/commondir",
    ],
)
async def test_a_pipe_keeps_no_git_waiting(ground: Ground, name: str) -> None:
    workdir, place = await ground.prepared()
    (place / "a.txt").write_text("agent\n")
    commit_all(place, "mine")
    (place / "b.txt").write_text("agent\n")
    pipe = place / name
    pipe.parent.mkdir(parents=True, exist_ok=True)
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    async with asyncio.timeout(60):
        snapshot = await ground.workdirs.snapshot(workdir, "one")
    assert {"a.txt", "b.txt"} <= {change.path for change in snapshot.files}
    if not name.startswith(".git/") or "objects" in name:
        assert any(name in reason or reason.startswith(".git: ") for reason in snapshot.left_out), snapshot.left_out
    assert (await ground.accept(workdir, snapshot)).followed
    assert (await ground.workdirs.retire(workdir, record={})).files


async def test_a_pipe_as_head_only_hides_the_agents_commits(ground: Ground) -> None:
    workdir, place = await ground.prepared()
    (place / "a.txt").write_text("agent\n")
    commit_all(place, "mine")
    (place / ".git" / "HEAD").unlink()
    os.mkfifo(place / ".git" / "HEAD")
    async with asyncio.timeout(60):
        snapshot = await ground.workdirs.snapshot(workdir, "one")
    assert snapshot.head is None
    assert [change.path for change in snapshot.files] == ["a.txt"]


async def test_a_git_that_waits_for_a_pipe_outside_is_ended_at_once(ground: Ground, tmp_path: Path) -> None:
    """An inner repository may point anywhere, where no look into the workdir finds the pipe."""
    workdir, place = await ground.prepared()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.mkfifo(elsewhere / "HEAD")
    (place / "inner").mkdir()
    (place / "inner" / ".git").write_text(f"gitdir: {elsewhere}\n")
    (place / "inner" / "x").write_text("x\n")
    other, _ = await ground.prepared("T2")
    async with asyncio.timeout(60):
        with pytest.raises(InvalidOperationError, match="git waits for a pipe"):
            await ground.workdirs.snapshot(workdir, "one")
        await ground.workdirs.snapshot(other, "one")


@pytest.mark.parametrize("read", [files.read_small, files.copy], ids=["read_small", "copy"])
def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[..., Any]
) -> None:
    """The mutation "opened blocking": a file becomes a pipe between the look and the open."""
    (inside / "file").write_text("text")
    (tmp_path / "target").mkdir()
    real = files.open_file

    def swapped(parent: int, name: bytes) -> Any:
        (inside / "file").unlink()
        os.mkfifo(inside / "file")
        return real(parent, name)

    monkeypatch.setattr(files, "open_file", swapped)
    results: list[Any] = []

    def work() -> None:
        with files.opened(inside) as root, files.opened(tmp_path / "target") as target:
            last = 1000 if read is files.read_small else target
            results.append(read(root, b"file", last) if read is files.read_small else read(root, b"file", last, 1000))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert results == [None if read is files.read_small else -1], "it must be opened without waiting for a writer"


def used(place: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in place.rglob("*"))


async def test_a_sparse_file_of_any_size_does_not_fill_the_disk(ground: Ground) -> None:
    workdir, place = await ground.prepared()
    with (place / "huge").open("wb") as file:
        file.truncate(8 * 10**12)
    before = used(ground.home)
    with pytest.raises(InvalidOperationError, match=r"huge .* GiB"):
        await ground.workdirs.snapshot(workdir, "one")
    with pytest.raises(InvalidOperationError, match=r"huge .* GiB"):
        await ground.workdirs.retire(workdir, record={})
    assert used(ground.home) < before + 10**7
    assert (place / "huge").stat().st_size == 8 * 10**12, "what cannot be saved is not deleted"
    (place / "huge").unlink()
    await ground.workdirs.retire(workdir, record={})


def test_holes_are_kept_and_the_limit_holds_while_copying(inside: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    with (inside / "sparse").open("wb") as file:
        file.seek(100 * 1024**2)
        file.write(b"data")
        file.truncate(200 * 1024**2)
    with files.opened(inside) as root, files.opened(target) as place:
        size = files.copy(root, b"sparse", place, 10**9)
        with pytest.raises(files.TooLargeError):
            files.copy(root, b"sparse", place, 1000)
    copied = target / "sparse"
    assert size == copied.stat().st_size == 200 * 1024**2
    assert copied.stat().st_blocks * 512 < 4 * 1024**2
    with copied.open("rb") as file:
        file.seek(100 * 1024**2)
        assert file.read(5) == b"data\0"


async def test_holes_come_back_from_the_vault(ground: Ground) -> None:
    workdir, place = await ground.prepared()
    with (place / "sparse").open("wb") as file:
        file.seek(50 * 1024**2)
        file.write(b"data")
    entry = await ground.workdirs.retire(workdir, record={})
    await ground.workdirs.restore(entry)
    assert (place / "sparse").stat().st_size == 50 * 1024**2 + 4
    assert (place / "sparse").stat().st_blocks * 512 < 4 * 1024**2


async def test_a_file_that_cannot_be_removed_leaves_record_and_vault_true(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir, place = await ground.prepared()
    (place / "stays").write_text("s")
    real = os.unlink

    def refuse(path: Any, *more: Any, **options: Any) -> None:
        if path == b"stays":
            raise PermissionError(1, "Operation not permitted", path)
        real(path, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        entry = await ground.workdirs.retire(workdir, record={})
    assert entry.not_removed is not None
    assert "stays" in entry.not_removed
    remains = place.with_name(".retired-T1-1")
    assert [path.name for path in remains.iterdir()] == ["stays"], "all else is gone"
    assert not place.exists()
    assert await ground.workdirs.list_entries() == [entry.evolve(not_removed=None)]
    assert await ground.workdirs.orphans(set()) == [], "it is no workdir any more, and gone with the next look"
    assert not remains.exists()


MODULES = """[submodule "../../up"]
\tpath = lib
\turl = https://example.org/lib
[submodule "run"]
\tpath = ../outside
\turl = ext::sh -c evil
\tupdate = !evil
[submodule "option"]
\tpath = -p
\turl = --upload-pack=evil
[submodule "fine"]
\tpath = fine
\turl = ../fine.git
"""


async def test_dangerous_submodules_are_named_in_the_review(ground: Ground) -> None:
    workdir, place = await ground.prepared()
    (place / ".gitmodules").write_text(MODULES)
    snapshot = await ground.workdirs.snapshot(workdir, "one")
    assert [warning.partition(":")[0] for warning in snapshot.warnings] == [".gitmodules"] * 6
    text = " ".join(snapshot.warnings)
    for part in ("../../up", "../outside", "ext::", "!evil", "-p", "--upload-pack"):
        assert part in text
    assert "fine" not in text
    (place / ".gitmodules").unlink()
    (place / ".gitmodules").symlink_to("/etc/passwd")
    linked = await ground.workdirs.snapshot(workdir, "two")
    assert linked.left_out == (".gitmodules: git does not keep a link of that name",)
    assert linked.files == ()
    (place / ".gitmodules").unlink()
    assert (await ground.workdirs.snapshot(workdir, "three")).warnings == ()
