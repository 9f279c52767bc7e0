"""Definition files: an agent as Markdown with front matter, a project as TOML. Reading one runs nothing."""

from ostler.agents.files.building import DriverKind, MakerSource, isolation_level
from ostler.agents.files.describing import explain, lifecycle_schema
from ostler.agents.files.discovery import Discovery, discover
from ostler.agents.files.loading import LoadedDefinition, load_agent_file, read_lifecycle
from ostler.agents.files.page import FileFault
from ostler.agents.files.project import (
    Project,
    ProjectDriver,
    ProjectLimits,
    ProjectRetention,
    ProjectRun,
    find_project,
    load_project_file,
)
from ostler.agents.files.registration import maker_for, register_files

__all__ = [
    "Discovery",
    "DriverKind",
    "FileFault",
    "LoadedDefinition",
    "MakerSource",
    "Project",
    "ProjectDriver",
    "ProjectLimits",
    "ProjectRetention",
    "ProjectRun",
    "discover",
    "explain",
    "find_project",
    "isolation_level",
    "lifecycle_schema",
    "load_agent_file",
    "load_project_file",
    "maker_for",
    "read_lifecycle",
    "register_files",
]
