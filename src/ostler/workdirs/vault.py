"""Where retired workdirs are kept, whole: `vault/KEY-N/` with `archive.tar.gz` and `manifest.jsonl`.

Steps of `retire`: the workdir is moved aside, packed, read back, looked at once more for changes, published by a
rename, and only then deleted. After `kill -9` between any two of them, `retire` again goes on where it stopped: the
name of what was moved aside holds the number of the entry.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostler.errors import InvalidOperationError, OstlerError, ValidationError, VaultError
from ostler.failpoints import Seams
from ostler.model.context import json_faults
from ostler.workdirs.archive import Item, Packed, check, pack, signs_of, unpack
from ostler.workdirs.files import NOTHING_THERE, opened, remove_tree, sync_folder, write_durably
from ostler.workdirs.records import VaultEntry, Workdir, check_key

_ARCHIVE = "archive.tar.gz"
_MANIFEST = "manifest.jsonl"
_ASIDE = ".retired-"
_DISCARDED = ".discarded-"
NEW = ".new-"
_TRIES = 3
_BLOCK = 512
_MAX_MANIFEST_LINE = 16 * 1024 * 1024
_LOGS = b"logs"
_WORK = b"work"
#: Bytes that stay free on the disk when something is brought back.
_RESERVE = 256 * 1024 * 1024


@dataclass(frozen=True)
class Vault:
    work: Path
    vault: Path
    seams: Seams

    # --- retire --------------------------------------------------------------------------------------

    def retire(self, workdir: Workdir, record: Mapping[str, Any], logs: Path | None) -> VaultEntry:
        key = check_key(workdir.key)
        if faults := tuple(json_faults("record", record, _MAX_MANIFEST_LINE // 2)):
            raise ValidationError(faults)
        place = Path(workdir.path)
        self.vault.mkdir(mode=0o700, parents=True, exist_ok=True)
        entry = None
        number, aside = self._aside(key, place.parent)
        if aside is not None:
            entry = self._finish(workdir, number, record, aside, logs)
            number += 1
        if os.path.lexists(place):
            aside = place.parent / f"{_ASIDE}{key}-{number}"
            place.rename(aside)
            sync_folder(place.parent)
            self.seams.fault("retire.move.after")
            return self._finish(workdir, number, record, aside, logs)
        if os.path.lexists(self.work / f"{NEW}{key}"):  # it was announced, and cut off before it was in its place
            self._live(key).unlink(missing_ok=True)
        if self._live(key).exists():
            entry = self._publish(workdir, number, record, None, logs)
            self._live(key).unlink()
        return entry or self.find(key) or self._publish(workdir, number, record, None, logs)

    def _finish(
        self, workdir: Workdir, number: int, record: Mapping[str, Any], aside: Path, logs: Path | None
    ) -> VaultEntry:
        """Save what was moved aside, and delete it."""
        entry = self._entry(self.vault / f"{workdir.key}-{number}")
        if entry is None:
            try:
                entry = self._publish(workdir, number, record, aside, logs)
            except (OstlerError, OSError):
                place = Path(workdir.path)
                if not os.path.lexists(place):
                    aside.rename(place)
                raise
        self.seams.fault("retire.publish.after")
        self._live(workdir.key).unlink(missing_ok=True)
        try:
            remove_tree(aside)
        except OSError as error:  # all of it is in the vault, so the record may say so; the rest is tried again later
            name = os.fsdecode(error.filename or b"")
            return entry.evolve(not_removed=f"{name} in {aside} could not be removed ({error.strerror}); remove it")
        sync_folder(aside.parent)
        self.seams.fault("retire.remove.after")
        return entry

    def announce(self, key: str) -> None:
        """Note that a workdir is about to be there. If it is missing when it is retired, the entry says so."""
        self.vault.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._live(key).touch()

    def is_half_retired(self, workdir: Workdir) -> bool:
        return self.vault.is_dir() and self._aside(workdir.key, Path(workdir.path).parent)[1] is not None

    def _live(self, key: str) -> Path:
        return self.vault / f".live-{key}"

    def _aside(self, key: str, beside: Path) -> tuple[int, Path | None]:
        """The number of the entry to make, and the workdir that an earlier call has moved aside for it."""
        for place in beside.glob(f"{_ASIDE}{key}-*") if beside.is_dir() else ():
            if (number := _number(place.name.removeprefix(_ASIDE), key)) is not None:
                return number, place
        taken = [number for folder in self.vault.iterdir() if (number := _number(folder.name, key)) is not None]
        return max(taken, default=0) + 1, None

    def _publish(
        self, workdir: Workdir, number: int, record: Mapping[str, Any], source: Path | None, logs: Path | None
    ) -> VaultEntry:
        final = self.vault / f"{workdir.key}-{number}"
        part = self.vault / f".{final.name}"
        remove_tree(part)
        part.mkdir(mode=0o700)
        try:
            with _roots(source, logs) as roots:
                packed = _packed(part / _ARCHIVE, roots, workdir.key)
        except (OstlerError, OSError):
            remove_tree(part)  # on a disk that is full, what there is of it helps nothing
            raise
        if source is not None and not _is_folder(source):
            packed.left_out.append("the workdir itself: it was no directory any more")
        self.seams.fault("retire.save.after")
        head = {
            "format": 1,
            "key": workdir.key,
            "number": number,
            "missing": source is None,
            "left_out": packed.left_out,
            "workdir": workdir.to_dict(),
            "record": dict(record),
            "saved_at": self.seams.clock.wall().isoformat(),
            "allocated": packed.allocated,
            "archive": _file_digest(part / _ARCHIVE),
        }
        lines = [json.dumps(line, ensure_ascii=True) for line in (head, *packed.items)]
        write_durably(part / _MANIFEST, ("\n".join(lines) + "\n").encode())
        part.rename(final)
        sync_folder(self.vault)
        entry = self._entry(final)
        if entry is None:
            raise VaultError(f"the entry {final} cannot be read back; check the disk, nothing was deleted")
        return entry

    # --- restore -------------------------------------------------------------------------------------

    def restore(self, entry: VaultEntry, logs: Path | None) -> Workdir:
        place = self.work / check_key(entry.key)
        if os.path.lexists(place):
            raise InvalidOperationError(f"{place} is in the way; retire what is there first")
        if entry.missing:
            raise InvalidOperationError(
                f"the workdir of {entry.key} was missing when it was retired; only its record is kept"
            )
        folder = self.vault / f"{entry.key}-{entry.number}"
        head, items, digest = _read_manifest(folder / _MANIFEST)
        if digest != entry.digest or head["archive"] != _file_digest(folder / _ARCHIVE):
            raise VaultError(f"the entry {folder} was changed since it was made; nothing was unpacked")
        self.work.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._require_space(int(head.get("allocated", sum(item.size for item in items))))
        part = self.work / f"{NEW}{entry.key}"
        remove_tree(part)
        with (folder / _ARCHIVE).open("rb") as source:
            check(source, items)
            part.mkdir(mode=0o700)
            with ExitStack() as stack:
                roots = {_WORK: stack.enter_context(opened(part))}
                if logs is not None:
                    logs.mkdir(parents=True)
                    roots[_LOGS] = stack.enter_context(opened(logs))
                unpack(source, items, roots)
        self.announce(entry.key)
        part.rename(place)
        sync_folder(self.work)
        return entry.workdir.evolve(path=str(place))

    def _require_space(self, needed: int) -> None:
        free = shutil.disk_usage(self.work).free
        if needed + _RESERVE > free:
            raise VaultError(
                f"the entry needs {needed} bytes and {free} are free; free some space, nothing was unpacked"
            )

    def discard(self, entry: VaultEntry) -> int:
        """Delete an entry for good; how many bytes that freed. What a kill leaves of it is no entry any more, and the
        next call removes it.
        """
        for place in self.vault.glob(f"{_DISCARDED}*"):
            remove_tree(place)
        folder = self.vault / f"{check_key(entry.key)}-{entry.number}"
        aside = self.vault / f"{_DISCARDED}{folder.name}"
        folder.rename(aside)
        sync_folder(self.vault)
        freed = sum(file.lstat().st_blocks * _BLOCK for file in aside.iterdir())
        remove_tree(aside)
        return freed

    # --- look ----------------------------------------------------------------------------------------

    def entries(self) -> list[VaultEntry]:
        """All of them, by key and number. What is damaged or half made is not among them."""
        if not self.vault.is_dir():
            return []
        entries = [self._entry(folder) for folder in self.vault.iterdir() if not folder.name.startswith(".")]
        return sorted((entry for entry in entries if entry), key=lambda entry: (entry.key, entry.number))

    def find(self, key: str) -> VaultEntry | None:
        """The last entry of a key."""
        if not self.vault.is_dir():
            return None
        numbers = sorted(number for folder in self.vault.iterdir() if (number := _number(folder.name, key)) is not None)
        return self._entry(self.vault / f"{key}-{numbers[-1]}") if numbers else None

    def orphans(self, keys: Collection[str]) -> list[Path]:
        """Workdirs on the disk, half made and half retired ones too, that none of the keys owns.

        The rest of a workdir that is in the vault already is not listed: it is removed, where that is possible by now.
        """
        if not self.work.is_dir():
            return []
        strays = [place for place in self.work.iterdir() if _owner(place.name) not in keys]
        saved = [place for place in strays if place.name.startswith(_ASIDE) and self._is_saved(place)]
        for place in saved:
            with suppress(OSError):
                remove_tree(place)
        return sorted(set(strays) - set(saved))

    def _is_saved(self, aside: Path) -> bool:
        return self._entry(self.vault / aside.name.removeprefix(_ASIDE)) is not None

    def _entry(self, folder: Path) -> VaultEntry | None:
        try:
            head, items, digest = _read_manifest(folder / _MANIFEST)
            return VaultEntry(
                key=head["key"],
                number=head["number"],
                path=str(folder),
                digest=digest,
                bytes=sum(item.size for item in items),
                files=sum(item.kind != "folder" for item in items),
                missing=head["missing"],
                left_out=tuple(head["left_out"]),
                workdir=Workdir.from_dict(head["workdir"]),
                record=head["record"],
                saved_at=head["saved_at"],
            ).checked()
        except (OSError, VaultError, ValueError, KeyError, TypeError, OstlerError):
            return None


@contextmanager
def _roots(work: Path | None, logs: Path | None) -> Iterator[list[tuple[bytes, int]]]:
    present = [(top, path) for top, path in ((_WORK, work), (_LOGS, logs)) if path is not None and _is_folder(path)]
    with ExitStack() as stack:
        yield [(top, stack.enter_context(opened(path))) for top, path in present]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _packed(file: Path, roots: list[tuple[bytes, int]], key: str) -> Packed:
    """Packed, read back, and unchanged on the disk since; all of it again where something changed meanwhile."""
    for _ in range(_TRIES):
        try:
            with file.open("w+b") as out:
                packed = pack(out, roots)
                out.flush()
                os.fsync(out.fileno())
                check(out, packed.items)
            if signs_of(roots) == packed.signs:
                return packed
        except PermissionError as error:
            name = os.fsdecode(error.filename)
            raise InvalidOperationError(
                f"{name} of {key} may not be read; make it readable, then retire it again"
            ) from error
        except OSError as error:
            if error.errno not in {*NOTHING_THERE, errno.EINVAL}:  # of a link that is none any more
                raise
    raise InvalidOperationError(f"files of {key} are still being changed; stop what works there, then retire it again")


def _read_manifest(file: Path) -> tuple[dict[str, Any], list[Item], str]:
    digest = hashlib.sha256()
    lines = []
    with file.open("rb") as source:
        while line := source.readline(_MAX_MANIFEST_LINE):
            digest.update(line)
            lines.append(json.loads(line))
    if not lines or not isinstance(lines[0], dict):
        raise VaultError(f"{file} is not a manifest")
    return lines[0], [Item.of(values) for values in lines[1:]], digest.hexdigest()


def _file_digest(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _number(name: str, key: str) -> int | None:
    owner, _, number = name.rpartition("-")
    return int(number) if owner == key and number.isascii() and number.isdecimal() else None


def _owner(name: str) -> str:
    if name.startswith(_ASIDE):
        return name.removeprefix(_ASIDE).rpartition("-")[0]
    return name.removeprefix(NEW)
