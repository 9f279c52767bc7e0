"""What a fresh member is made of: its definition, its model and its directory, from the settings as they are now."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ostler.agents.registry import AgentFactory, AgentRegistry
from ostler.definitions.project import ProjectSettings
from ostler.errors import NotFoundError, ValidationError
from ostler.home import SETTINGS_FILE
from ostler.model.crew import CrewSettings, crew_name_faults
from ostler.workdirs.records import check_key

GetConfig = Callable[[], ProjectSettings]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberPlan:
    """One generation of a member, before it begins."""

    agent_id: str
    crew: str
    settings: CrewSettings
    #: Where it works on tasks without a repository.
    workdir: Path

    @property
    def model(self) -> str | None:
        return self.settings.model


class MemberFactory(AgentFactory):
    """Every member reads the settings anew; nothing of them is kept from one to the next."""

    __slots__ = ("_checked_of_config", "_crews", "_home", "_of_config", "_refresh", "get_config")

    def __init__(
        self,
        registry: AgentRegistry,
        get_config: GetConfig,
        home: Path,
        *,
        crews: Mapping[str, CrewSettings] | None = None,
        refresh: Callable[[], object] | None = None,
        project: str | None = None,
    ) -> None:
        """`crews` take the place of those in the settings. `refresh` makes definition files known before each look.
        `project` is the directory of the project that declares them, where that is not the project of the home.
        """
        super().__init__(registry, get_config, project=project)
        self.get_config = get_config
        self._home = home
        self._crews = None if crews is None else _checked(crews)
        self._of_config: Mapping[str, CrewSettings] = {}
        self._checked_of_config: Mapping[str, CrewSettings] = {}
        self._refresh = refresh
        faults = [fault for name in self._crews or {} for fault in crew_name_faults("crews", name)]
        if faults:
            raise ValidationError(faults)

    def declared(self) -> Mapping[str, CrewSettings]:
        """All crews by name, in the order of the file."""
        if self._crews is not None:
            return self._crews
        crews = self.get_config().crew
        if crews is not self._of_config:  # the same object until the file changes
            self._of_config, self._checked_of_config = crews, _checked(crews)
        return self._checked_of_config

    def settings(self, crew: str) -> CrewSettings:
        declared = self.declared()
        if crew in declared:
            return declared[crew]
        if not declared:
            raise NotFoundError(
                f'no crew is declared; write one into {SETTINGS_FILE}, such as [crew.coder] with agent = "claude"'
            )
        close = difflib.get_close_matches(crew, declared, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(declared)}"
        raise NotFoundError(f"there is no crew {crew!a}; {hint}")

    def plan(self, agent_id: str, crew: str, *, check: bool = True) -> MemberPlan:
        """Raises `AgentNotFoundError` for an unknown definition, and `DefinitionError` with file and line."""
        config, settings = self.get_config(), self.settings(crew)
        if check:
            if self._refresh is not None:
                self._refresh()
            self._registry.find(settings.agent, self._project)
        work = self._home / Path(config.orchestrator.workdir).expanduser()
        if self._project is not None:  # members of two projects may have the same name
            work /= folder_of(self._project)
        workdir = work / check_key(agent_id)
        return MemberPlan(agent_id=agent_id, crew=crew, settings=settings, workdir=workdir)


def folder_of(project: str) -> str:
    """A name for the files of a project: its own, which people know, and what makes it the only one."""
    digest = hashlib.sha256(project.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '-', Path(project).name)[:40]}-{digest}"


def _checked(crews: Mapping[str, CrewSettings]) -> dict[str, CrewSettings]:
    return {name: CrewSettings.coerced(settings) for name, settings in crews.items()}
