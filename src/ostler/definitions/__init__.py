"""Definition files: an agent as Markdown with front matter, a project as TOML. Reading one runs nothing."""

from ostler.definitions.discover import Discovery, discover, register_file, register_files, validate_files
from ostler.definitions.load import FileFault, LoadedDefinition, load_agent_file, read_lifecycle
from ostler.definitions.project import DaemonSettings, ProjectSettings, RetentionSettings, load_settings
from ostler.definitions.template import json_schema, settings_template

__all__ = [
    "DaemonSettings",
    "Discovery",
    "FileFault",
    "LoadedDefinition",
    "ProjectSettings",
    "RetentionSettings",
    "discover",
    "json_schema",
    "load_agent_file",
    "load_settings",
    "read_lifecycle",
    "register_file",
    "register_files",
    "settings_template",
    "validate_files",
]
