"""One agent from one file: Markdown with front matter, or the TOML of Codex."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostler.agents.files.building import DriverKind, MakerSource, build, isolation_level
from ostler.agents.files.checking import checked
from ostler.agents.files.keys import LIFECYCLE, WORKTREE
from ostler.agents.files.page import Page, Trail, read_text
from ostler.agents.files.tomltext import read_toml
from ostler.agents.files.tracing import blame_record
from ostler.agents.files.yamltext import read_yaml
from ostler.agents.manifest import MAX_DESCRIPTION, AgentKind, AgentManifest
from ostler.agents.registry import definition_id
from ostler.model.record import Record
from ostler.model.spawn import AgentSpawnOptions

FENCE = "---"
#: What runs a file that names no driver: such files were written for these two.
CLAUDE = "claude"
CODEX = "codex"

_CODEX_PROMPT = "developer_instructions"


@dataclass(frozen=True, kw_only=True)
class LoadedDefinition(Record):
    """What a file says, checked. Nothing that it names was imported or started."""

    manifest: AgentManifest
    maker_source: MakerSource
    path: str
    #: The word under `isolation`, of the file or else of its project.
    isolation: str | None = None
    #: SHA-256 of the file, to notice that it changed.
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """A definition that stands somewhere on a page."""

    name: str
    name_trail: Trail
    description: str | None
    prompt: str | None
    #: Keys that are not ours.
    extra: Mapping[str, Any]
    #: Where the keys of `lifecycle` stand.
    trail: Trail
    driver: str
    digest: str


def load_agent_file(path: str | Path) -> LoadedDefinition:
    """Read one agent; raises one `DefinitionError` that carries every fault of the file.

    `.toml` is read as Codex writes it, everything else as Markdown.
    """
    return read_definition(Path(path), Path(path))


def read_definition(shown: Path, real: Path, *, follow: bool = True) -> LoadedDefinition:
    """`shown` gives the name and stands in the sentences, `real` is opened; without `follow` it may be no link."""
    page = Page(str(shown))
    text, raw = read_text(page, real, follow=follow)
    toml = shown.suffix == ".toml"
    body = _read_codex(page, text) if toml else _read_markdown(page, text)
    ours = {"name", "description", LIFECYCLE.name, *([_CODEX_PROMPT] if toml else [])}
    if page.data.get("name", "") is None:
        page.blame(("name",), "has no value; write one, or remove the key")
    draft = Draft(
        name=_text(page, page.data.get("name"), "name") or shown.stem,
        name_trail=("name",),
        description=_text(page, page.data.get("description"), "description"),
        prompt=body.strip() or None,
        extra={key: value for key, value in page.data.items() if key not in ours},
        trail=(LIFECYCLE.name,),
        driver=CODEX if toml else CLAUDE,
        digest=hashlib.sha256(raw).hexdigest(),
    )
    _blame_misspelt(page)
    values = checked(page, LIFECYCLE, draft.trail) if page.holds(draft.trail) else {}
    found = define(page, draft, values)
    page.settle()
    return found


def _read_codex(page: Page, text: str) -> str:
    read_toml(page, text)
    return _text(page, page.data.get(_CODEX_PROMPT), _CODEX_PROMPT) or ""


def _read_markdown(page: Page, text: str) -> str:
    front, body = _split(page, text)
    if front is not None:
        read_yaml(page, front, 2)
    return body


def _split(page: Page, text: str) -> tuple[str | None, str]:
    """The front matter, if there is one, and the body."""
    lines = text.split("\n")
    if not text.strip():
        page.stop(1, "the file is empty; write what the agent is to do")
    if lines[0].rstrip() != FENCE:
        return None, text
    end = next((number for number, line in enumerate(lines[1:], 1) if line.rstrip() == FENCE), None)
    if end is None:
        page.stop(1, f"the front matter begins here and never ends; close it with a line of {FENCE}")
    return "\n".join(lines[1:end]), "\n".join(lines[end + 1 :])


def _blame_misspelt(page: Page) -> None:
    """Unknown keys are kept, but this one misspelt would silently switch off all that it says."""
    known = LIFECYCLE.name
    for key in page.data:
        if key != known and difflib.get_close_matches(key.lower(), [known], n=1, cutoff=0.75):
            page.blame((key,), f"is not known; did you mean {known}?")


def define(page: Page, draft: Draft, values: Mapping[str, Any]) -> LoadedDefinition:
    """Build it from the values of its keys; what is wrong is blamed on the page, which the caller settles."""
    built = build(page, values, draft.trail, draft.driver)
    kind = AgentKind.PYTHON if built.source.kind is DriverKind.PYTHON else AgentKind.COMMAND
    extra = {**draft.extra, **({LIFECYCLE.name: built.kept} if built.kept else {})}
    manifest = AgentManifest(
        id=definition_id(kind, draft.name),
        name=draft.name,
        kind=kind,
        description=_clipped(draft.description),
        defaults=built.options,
        source=page.path,
        command=built.source.command,
        prompt=draft.prompt,
        extra=extra or None,
    )
    faults = manifest.validate().faults
    for fault in faults:
        if fault.field == "name":
            page.blame(draft.name_trail, fault.bound, fault.value)
    blame_record(page, (fault for fault in faults if fault.field != "name"), LIFECYCLE, draft.trail)
    return LoadedDefinition(
        manifest=manifest,
        maker_source=built.source,
        path=page.path,
        isolation=built.isolation,
        digest=draft.digest,
    )


def read_lifecycle(source: str, lifecycle: Mapping[str, Any]) -> dict[str, Any]:
    """The same keys on a class in Python: what an `AgentRegistry` takes as its `read_lifecycle`."""
    page = Page(source)
    trail = (LIFECYCLE.name,)
    page.data = {LIFECYCLE.name: _listed(lifecycle)}
    values = checked(page, LIFECYCLE, trail)
    if "driver" in values:
        page.blame((*trail, "driver"), "is not for a class, which runs itself")
    built = build(page, values, trail, CLAUDE)
    kept = {LIFECYCLE.name: built.kept} if built.kept else None
    unknown = AgentKind.PYTHON
    manifest = AgentManifest(
        id=definition_id(unknown, source), name="a", kind=unknown, defaults=built.options, extra=kept
    )
    blame_record(page, manifest.validate(), LIFECYCLE, trail)
    page.settle()
    return {"defaults": built.options, "extra": kept}


def _listed(value: Any) -> Any:
    """Python has two kinds of list; files have one."""
    if isinstance(value, Mapping):
        return {str(key): _listed(child) for key, child in value.items()}
    return [_listed(child) for child in value] if isinstance(value, (list, tuple)) else value


def with_isolation(found: LoadedDefinition, word: str | None) -> LoadedDefinition:
    """The same with the isolation of its project, where it names none itself."""
    if word is None or found.isolation is not None:
        return found
    manifest = found.manifest
    options = (manifest.defaults or AgentSpawnOptions()).evolve(isolation_level=isolation_level(word))
    extra = dict(manifest.extra or {})
    if word == WORKTREE:
        extra[LIFECYCLE.name] = {**extra.get(LIFECYCLE.name, {}), "isolation": word}
    return found.evolve(manifest=manifest.evolve(defaults=options, extra=extra or None), isolation=word)


def _text(page: Page, value: Any, key: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    page.blame_value((key,), "must be text; put it in quotes")
    return None


def _clipped(text: str | None) -> str | None:
    """Other tools set no limit to it, so a long one is no fault."""
    return text if text is None or len(text) <= MAX_DESCRIPTION else f"{text[: MAX_DESCRIPTION - 1]}…"
