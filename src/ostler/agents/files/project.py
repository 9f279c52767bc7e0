"""The file of a project, `ostler.toml`: what holds for all of its agents, and agents that need no file of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from ostler.agents.files.checking import checked, required_one
from ostler.agents.files.forms import Form
from ostler.agents.files.keys import ISOLATION_WORDS, LIFECYCLE, WORKTREE, Key
from ostler.agents.files.loading import CLAUDE, Draft, LoadedDefinition, define, with_isolation
from ostler.agents.files.page import Page, read_text
from ostler.agents.files.tomltext import read_toml
from ostler.agents.files.tracing import blame_record
from ostler.model.record import Record
from ostler.model.types import Interval

PROJECT_FILE = "ostler.toml"

_TEN_YEARS = timedelta(days=3650)
_DRIVER_KEYS = ("acp", "command")

PROJECT = Key(
    name="ostler.toml",
    form=Form.KEYS,
    says="What holds for a project.",
    keys=(
        Key(
            name="project",
            form=Form.KEYS,
            says="What every agent of the project shares.",
            keys=(
                Key(
                    name="default-isolation",
                    form=Form.CHOICE,
                    choices=ISOLATION_WORDS,
                    says="Where an agent lives that does not say so itself.",
                    example=WORKTREE,
                    field="default_isolation",
                ),
                Key(
                    name="base",
                    form=Form.TEXT,
                    says="The branch that worktrees start from.",
                    example="main",
                    field="base",
                ),
            ),
        ),
        Key(
            name="limits",
            form=Form.KEYS,
            says="Limits of all agents together.",
            keys=(
                Key(
                    name="agents",
                    form=Form.COUNT,
                    says="Agents at the same time.",
                    example="8",
                    field="limits.agents",
                ),
                Key(
                    name="cost-per-day",
                    form=Form.MONEY,
                    says="What all of them may cost in a day.",
                    example="40.0",
                    field="limits.cost_per_day",
                ),
            ),
        ),
        Key(
            name="retention",
            form=Form.KEYS,
            says="How long things are kept.",
            keys=(
                Key(
                    name="finished",
                    form=Form.DURATION,
                    says="Records of agents that are gone.",
                    example="14d",
                    field="retention.finished",
                ),
                Key(
                    name="workdirs",
                    form=Form.DURATION,
                    says="Workdirs that no instance uses any more.",
                    example="3d",
                    field="retention.workdirs",
                ),
            ),
        ),
        Key(
            name="driver",
            form=Form.NAMED,
            says="Drivers by name; they replace built-in ones or add to them.",
            example='[driver.codex]\nacp = ["codex-acp"]',
            each=Key(
                name="NAME",
                form=Form.KEYS,
                says="How to start it: one of acp and command.",
                keys=(
                    Key(name="acp", form=Form.COMMAND, says="A program that speaks ACP.", example='["codex-acp"]'),
                    Key(name="command", form=Form.COMMAND, says="A program that does not.", example='["aider"]'),
                    Key(name="env", form=Form.NAMES, says="Variables that it may see.", example='["API_KEY"]'),
                ),
            ),
        ),
        Key(
            name="run",
            form=Form.NAMED,
            says="What is started together with the project.",
            example='[run.web-review]\nagent = "reviewer"',
            each=Key(
                name="NAME",
                form=Form.KEYS,
                says="One agent that is kept running.",
                keys=(
                    Key(name="agent", form=Form.TEXT, says="The name of the agent.", example="reviewer"),
                    Key(name="tasks", form=Form.TEXT, says="Where its work comes from.", example="github:label=review"),
                ),
            ),
        ),
        Key(
            name="agent",
            form=Form.NAMED,
            says="Agents that need no file of their own.",
            example='[agent.fixer]\ndriver = "acp:claude"',
            each=Key(
                name="NAME",
                form=Form.KEYS,
                says="The keys of lifecycle, a description, and what the agent is told.",
                keys=(
                    Key(name="description", form=Form.TEXT, says="What it is for.", example="Fixes one test"),
                    Key(name="instructions", form=Form.TEXT, says="What it is told.", example="Fix the test."),
                    *LIFECYCLE.keys,
                ),
            ),
        ),
    ),
)


@dataclass(frozen=True, kw_only=True)
class ProjectLimits(Record):
    #: None means no limit of the project's own.
    agents: Annotated[int, Interval(ge=1, le=10_000)] | None = None
    cost_per_day: Annotated[float, Interval(ge=0, le=1_000_000)] | None = None


@dataclass(frozen=True, kw_only=True)
class ProjectRetention(Record):
    #: None means what the home says.
    finished: Annotated[timedelta, Interval(ge=timedelta(0), le=_TEN_YEARS)] | None = None
    workdirs: Annotated[timedelta, Interval(ge=timedelta(0), le=_TEN_YEARS)] | None = None


@dataclass(frozen=True, kw_only=True)
class ProjectDriver(Record):
    #: One of the two.
    acp: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None
    env: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ProjectRun(Record):
    agent: str
    tasks: str | None = None


@dataclass(frozen=True, kw_only=True)
class Project(Record):
    path: str
    #: A word as definition files have it; `isolation_level` says which level it is.
    default_isolation: str | None = None
    base: str | None = None
    limits: ProjectLimits = ProjectLimits()
    retention: ProjectRetention = ProjectRetention()
    drivers: Mapping[str, ProjectDriver] | None = None
    runs: Mapping[str, ProjectRun] | None = None
    agents: tuple[LoadedDefinition, ...] = ()


def load_project_file(path: str | Path) -> Project:
    """Read a project; raises one `DefinitionError` that carries every fault of the file."""
    return read_project(Path(path), Path(path))


def read_project(shown: Path, real: Path, *, follow: bool = True) -> Project:
    page = Page(str(shown))
    text, raw = read_text(page, real, follow=follow)
    read_toml(page, text)
    values = checked(page, PROJECT, ())
    shared = values.get("project", {})
    project = Project(
        path=page.path,
        default_isolation=shared.get("default-isolation"),
        base=shared.get("base"),
        limits=ProjectLimits(**_fields(values.get("limits", {}))),
        retention=ProjectRetention(**_fields(values.get("retention", {}))),
        drivers=_drivers(page, values.get("driver", {})) or None,
        runs=_runs(page, values.get("run", {})) or None,
    )
    blame_record(page, project.validate(), PROJECT, ())
    digest = hashlib.sha256(raw).hexdigest()
    agents = tuple(
        with_isolation(define(page, _inline(name, keys, digest), keys), project.default_isolation)
        for name, keys in values.get("agent", {}).items()
    )
    page.settle()
    return project.evolve(agents=agents)


def find_project(start: str | Path) -> Path | None:
    """The nearest project file, from here upwards."""
    here = Path(start).resolve()
    return next((found for folder in (here, *here.parents) if (found := folder / PROJECT_FILE).is_file()), None)


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in values.items()}


def _drivers(page: Page, values: Mapping[str, Any]) -> dict[str, ProjectDriver]:
    return {
        name: ProjectDriver(**{key: tuple(value) for key, value in keys.items()})
        for name, keys in values.items()
        if required_one(page, keys, _DRIVER_KEYS, ("driver", name))
    }


def _runs(page: Page, values: Mapping[str, Any]) -> dict[str, ProjectRun]:
    for name, keys in values.items():
        if "agent" not in keys and not page.is_blamed(("run", name, "agent")):
            page.blame(("run", name), "must name its agent")
    return {name: ProjectRun(**keys) for name, keys in values.items() if "agent" in keys}


def _inline(name: str, keys: Mapping[str, Any], digest: str) -> Draft:
    return Draft(
        name=name,
        name_trail=("agent", name),
        description=keys.get("description"),
        prompt=keys.get("instructions", "").strip() or None,
        extra={},
        trail=("agent", name),
        driver=CLAUDE,
        digest=digest,
    )
