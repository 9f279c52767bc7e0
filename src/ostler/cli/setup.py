"""Commands that set up: init, schema, agents, token, workspace, completion, version."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import click

from ostler.cli import completers
from ostler.cli.common import Daemon, Group, fail, output_option, seconds_of, the_project
from ostler.cli.output import as_json, counted, local_time, note, plain, short_path
from ostler.cli.table import Column, print_facts, show
from ostler.errors import ExitCode
from ostler.home import AGENTS_FOLDER, HOME_NAME, SETTINGS_FILE
from ostler.version import __version__

_EXAMPLE = """\
---
description: Says hello; change it into an agent of your own
lifecycle:
  driver: {command: [sh, -c, 'echo "hello, $1"', hello, "{prompt}"]}
  limits: {time: 10min}
  restart: no
---
"""
#: The home lies in the project; only its definitions belong into the repository.
_IGNORE = f"*\n!.gitignore\n!{AGENTS_FOLDER}/\n!{AGENTS_FOLDER}/**\n"


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=Path())
def init(folder: Path) -> None:
    """Prepare a project: a home of its own, a first agent, settings. Changes nothing that is there."""
    from ostler.definitions import template  # noqa: PLC0415 - loads pydantic

    home = folder / HOME_NAME
    written = []
    (home / AGENTS_FOLDER).mkdir(parents=True, exist_ok=True)
    home.chmod(0o700)
    schemas = {home / name: _schema_text(kind) for kind, name in template.SCHEMA_FILES.items()}
    for path, text in schemas.items():
        path.write_text(text)
    files = {
        home / ".gitignore": _IGNORE,
        home / AGENTS_FOLDER / "hello.md": _EXAMPLE,
        folder / SETTINGS_FILE: template.settings_template(),
    }
    has_agents = any((home / AGENTS_FOLDER).iterdir())
    for path, text in files.items():
        if path.exists() or (path.suffix == ".md" and has_agents):
            continue
        path.write_text(text)
        written.append(str(path))
    if not written:
        note(f"{short_path(home.absolute())} is prepared already; nothing was changed")
        return
    click.echo(f"Wrote {', '.join(written)}. Next:")
    click.echo('  ostler run hello "world"')


def _schema_text(kind: Any) -> str:
    from ostler.definitions.template import json_schema  # noqa: PLC0415 - loads pydantic

    return json.dumps(json_schema(kind), indent=2) + "\n"


@click.command()
@click.argument("what", type=click.Choice(["settings", "definition", "api"]))
def schema(what: str) -> None:
    """Print the JSON Schema of ostler.toml (settings) or of the front matter of definition files, for editors; or the
    HTTP API as OpenAPI.
    """
    if what == "api":
        as_json(Daemon().call("openapi"))
        return
    click.echo(_schema_text("project" if what == "settings" else "agent"), nl=False)


# --- definitions -------------------------------------------------------------------------------------


@click.group(cls=Group, invoke_without_command=True)
@click.pass_context
def agents(ctx: click.Context) -> None:
    """Definitions of agents: list, show, validate."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_agents, form="table")


@agents.command("list")
@output_option()
def list_agents(form: str) -> None:
    """List the agents that can be run by name."""
    show(Daemon().call("definitions"), form, _AGENT_COLUMNS, empty="there is no agent yet; `ostler init` writes one")


_AGENT_COLUMNS = (
    Column("NAME", lambda definition: str(definition["name"]), least=20),
    Column("KIND", lambda definition: str(definition["kind"]), leaves=1),
    Column("DESCRIPTION", lambda definition: definition["description"] or "", least=20),
    Column("FROM", lambda definition: short_path(definition["source"] or ""), least=20, leaves=2),
)


@agents.command("show")
@click.argument("name", shell_complete=completers.definitions)
def show_agent(name: str) -> None:
    """Show a definition with its defaults, as JSON."""
    as_json(Daemon().call("definition", name=name))


@agents.command()
def validate() -> None:
    """Check the definition files and settings of this project; needs no daemon."""
    from ostler.definitions import validate_files  # noqa: PLC0415 - loads YAML and pydantic

    root = the_project()
    files = validate_files(root) if root.is_dir() else []
    if not files:
        note(f"there are no definition files in {short_path(root)}; `ostler init` writes one")
        return
    for path, faults in files:
        name = path.relative_to(root) if path.is_relative_to(root) else short_path(path)
        click.echo(f"{name}   {counted(len(faults), 'fault') if faults else 'ok'}")
        for fault in faults:
            line = f"{fault.line}: " if fault.line else ""
            click.echo(f"  {line}{plain(fault.sentence)}")
    if any(faults for _, faults in files):
        raise click.exceptions.Exit(ExitCode.FAILED)


# --- tokens ------------------------------------------------------------------------------------------


@click.group(cls=Group)
def token() -> None:
    """Tokens for the TCP listener (`ostler up --listen`)."""


@token.command()
@click.argument("name")
@click.option(
    "--role",
    default="operator",
    show_default=True,
    help="viewer, operator, reviewer or admin.",
    shell_complete=completers.values("viewer", "operator", "reviewer", "admin"),
)
@click.option("--expires", help="Valid for so long, such as 30d; else until it is revoked.")
def create(name: str, role: str, expires: str | None) -> None:
    """Make a token. It is printed once and kept only as a hash; pass it on in $OSTLER_TOKEN."""
    reply = Daemon().call("create_token", name=name, role=role, expires_in=seconds_of("--expires", expires))
    click.echo(reply["token"])
    note(f"this is shown once; revoke it with `ostler token revoke {plain(name)}`")


@token.command("list")
@output_option()
def list_tokens(form: str) -> None:
    """List tokens; never their secrets."""
    show(Daemon().call("tokens"), form, _TOKEN_COLUMNS, empty="there is no token; make one: ostler token create NAME")


_TOKEN_COLUMNS = (
    Column("NAME", lambda token: str(token["name"]), least=12),
    Column("CREATED", lambda token: local_time(token["created_at"]), leaves=1),
    Column("EXPIRES", lambda token: local_time(token["expires_at"])),
    Column("REVOKED", lambda token: local_time(token["revoked_at"])),
)


@token.command()
@click.argument("name", shell_complete=completers.tokens)
def revoke(name: str) -> None:
    """Revoke a token by its name or id; it is refused from now on."""
    for revoked in Daemon().call("revoke_token", token_id=name)["revoked"]:
        click.echo(f"{plain(revoked)} is revoked.")


# --- the workspace -----------------------------------------------------------------------------------

_SPAWNING = "agents.lifecycle.spawn"


@click.group(cls=Group)
def workspace() -> None:
    """The plan of this home, its feature flag, and its share of tokens."""


@workspace.command("show")
@output_option(name=False)
def show_workspace(form: str) -> None:
    """Show the plan and what it admits."""
    _show_workspace(Daemon().call("workspace"), form)


@workspace.command("set")
@click.option("--plan", type=click.Choice(["core", "writer_pro", "teams", "enterprise"]), help="What it may have.")
@click.option("--spawning", type=click.Choice(["on", "off"]), help="Whether agents may be spawned.")
@click.option("--tokens-per-minute", type=click.IntRange(0), help="For agents without a limit of their own; 0: any.")
@click.option("--name", help="Its name in messages.")
@output_option(name=False)
def set_workspace(
    plan: str | None, spawning: str | None, tokens_per_minute: int | None, name: str | None, form: str
) -> None:
    """Change the plan, the flag or the token share. Agents that are active already go on."""
    disabled = None if spawning is None else [_SPAWNING] if spawning == "off" else []
    changes = {"tier": plan, "disabled_features": disabled, "max_tokens_per_minute": tokens_per_minute, "name": name}
    if all(value is None for value in changes.values()):
        raise click.UsageError("name what to change: --plan, --spawning, --tokens-per-minute or --name")
    _show_workspace(Daemon().call("change_workspace", **changes), form)


def _show_workspace(reply: dict[str, Any], form: str) -> None:
    if form in {"json", "jsonl"}:
        as_json(reply, indent=2 if form == "json" else None)
        return
    plan, share = reply["plan"], reply["max_tokens_per_minute"]
    most = "any number of" if plan["max_concurrent"] is None else str(plan["max_concurrent"])
    rows = [
        ("name", plain(reply["name"])),
        ("plan", reply["tier"]),
        (
            "admits",
            f"{most} active agents; isolation {', '.join(plan['isolation'])}; restart {', '.join(plan['restart'])}",
        ),
        ("active", str(reply["active_instances"])),
        ("spawning", "off" if _SPAWNING in reply["disabled_features"] else "on"),
        ("tokens per minute", str(share) if share else "unlimited"),
    ]
    print_facts(("WORKSPACE", ""), rows)
    if reply["is_over_limit"]:
        note("more agents are active than the plan admits; none is ended, and none is started until there is room")


# --- this program ------------------------------------------------------------------------------------


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a SHELL, such as: eval "$(ostler completion bash)"."""
    from click.shell_completion import get_completion_class  # noqa: PLC0415 - only here

    completion_class = get_completion_class(shell)
    if completion_class is None:
        raise fail(f"there is no completion for {shell}", ExitCode.USAGE)
    root = click.get_current_context().find_root().command
    click.echo(completion_class(root, {}, "ostler", completers.COMPLETE_VARIABLE).source())


@click.command()
def version() -> None:
    """Say which Ostler this is."""
    print_facts(
        ("PART", "VERSION"),
        [("ostler", __version__), ("python", platform.python_version()), ("program", short_path(sys.argv[0]))],
    )
