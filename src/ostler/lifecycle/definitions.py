"""From a definition id to the manifest and the maker of an agent: by the registry, else by what the store kept."""

from __future__ import annotations

from uuid import UUID

from ostler.agents.base import AgentMaker, import_target, maker_of_callable
from ostler.agents.registry import AgentKind, AgentManifest, maker_of
from ostler.clock import Clock
from ostler.definitions.projects import Projects
from ostler.errors import AgentNotFoundError
from ostler.model.spawn import Definition
from ostler.store import workspaces
from ostler.store.store import Store


class Definitions:
    """A command, or a class that can be imported, needs no registration to be adopted or restarted."""

    def __init__(self, projects: Projects, store: Store, clock: Clock) -> None:
        self.projects = projects
        self.registry = projects.registry
        self._store = store
        self._clock = clock
        #: Manifests that the store has as they are.
        self._kept: dict[UUID, AgentManifest] = {}
        self._names: dict[UUID, str] = {}

    async def manifest(self, definition_id: UUID) -> AgentManifest:
        """Raises `AgentNotFoundError` where neither the registry nor the store knows it."""
        try:
            return self.registry.manifest(definition_id)
        except AgentNotFoundError:
            kept = await self._store.read(workspaces.get_definition, definition_id)
            if kept is None:
                raise
            return AgentManifest.from_dict(kept.manifest)

    async def name(self, definition_id: UUID) -> str:
        """For people; the id where neither the registry nor the store knows it."""
        name = self._names.get(definition_id)
        if name is None:
            try:
                name = self._names[definition_id] = (await self.manifest(definition_id)).name
            except AgentNotFoundError:
                return str(definition_id)
        return name

    async def find(self, name_or_id: UUID | str, project: str | None = None) -> AgentManifest:
        """By id, or by the name of a registered definition of a project."""
        if isinstance(name_or_id, UUID):
            return await self.manifest(name_or_id)
        try:
            return await self.manifest(UUID(name_or_id))
        except ValueError:
            return self.registry.find(name_or_id, project)

    def maker(self, manifest: AgentManifest) -> AgentMaker:
        """Raises `AgentNotFoundError` for a Python agent that is neither registered nor importable."""
        try:
            return self.registry.maker(manifest.id)
        except AgentNotFoundError:
            if manifest.kind is AgentKind.COMMAND or manifest.driver is not None:
                return maker_of(manifest)
            return _imported(manifest)

    async def keep(self, manifest: AgentManifest) -> None:
        """Keep the whole manifest, before an instance of it is reserved."""
        if self._kept.get(manifest.id) is manifest:
            return
        now = self._clock.wall()
        definition = Definition(
            definition_id=manifest.id,
            name=manifest.name,
            kind=manifest.kind,
            manifest=manifest.to_dict(),
            source=manifest.source,
            created_at=now,
            updated_at=now,
        )
        await self._store.run(workspaces.put_definition, definition.checked())
        self._kept[manifest.id] = manifest


def _imported(manifest: AgentManifest) -> AgentMaker:
    module, _, path = (manifest.source or "").partition(":")
    missing = AgentNotFoundError(
        f"the definition {manifest.name} is not registered, and {manifest.source or 'its source'} cannot be imported; "
        "register it, then try again"
    )
    if not module or not path or module == "__main__" or "<" in path:
        raise missing
    try:
        source = import_target(f"{module}:{path}")
    except Exception as error:
        raise missing from error
    return maker_of_callable(source)
