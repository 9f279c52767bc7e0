"""`ostler audit`: whether the chain of who did what is whole."""

from __future__ import annotations

import json
import re
from uuid import UUID

import click

from ostler.cli.exits import Exit
from ostler.cli.homes import home_option, look, require_workspace, workspace_option
from ostler.cli.output import as_json, plain
from ostler.model.ledger import AuditHead, AuditReport
from ostler.model.people import HOME_WORKSPACE_ID
from ostler.store import Store

_PAGE = 100
_KEPT = re.compile(r"([0-9]{1,18}) *: *([0-9a-f]{64})")


@click.group()
def audit() -> None:
    """Verify the chain of who did what."""


@audit.command()
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="How to print it.")
@click.option("--kept-head", metavar="NUMBER:HASH", help="The end of the chain as it was noted elsewhere before.")
@workspace_option(default=None)
@home_option
@click.pass_context
def verify(ctx: click.Context, output: str, kept_head: str | None, workspace: UUID | None, home: str) -> None:
    """Walk the chain and name every entry that was edited, removed, moved or put in. Exit 1 if there is one."""
    kept = _head(kept_head, workspace or HOME_WORKSPACE_ID) if kept_head is not None else None
    chosen = workspace or (HOME_WORKSPACE_ID if kept else None)
    reports = look(home, lambda store: _verify(store, chosen, kept))
    sound = all(report.is_sound for report in reports)
    if output == "json":
        as_json({"is_sound": sound, "workspaces": [json.loads(report.to_json()) for report in reports]})
    else:
        for report in reports:
            _print(report)
    ctx.exit(Exit.OK if sound else Exit.FAILED)


async def _verify(store: Store, workspace: UUID | None, kept: AuditHead | None) -> list[AuditReport]:
    if workspace is not None:
        if workspace != HOME_WORKSPACE_ID and not await _has_trace(store, workspace):
            await require_workspace(store, workspace)
        return [await store.verify_audit(workspace, kept_head=kept)]
    # Every store has its home workspace, so that it is looked at also when nothing is left of it.
    reports = [await store.verify_audit(HOME_WORKSPACE_ID)]
    after: UUID | None = None
    while page := await store.list_chains(after, _PAGE):
        reports += [await store.verify_audit(one) for one in page if one != HOME_WORKSPACE_ID]
        after = page[-1]
    return reports


async def _has_trace(store: Store, workspace: UUID) -> bool:
    """Whether anything tells of it; a wrong id is another matter than a chain whose workspace was removed."""
    before = UUID(int=workspace.int - 1) if workspace.int else None
    return await store.list_chains(before, 1) == [workspace]


def _print(report: AuditReport) -> None:
    verdict = "sound" if report.is_sound else "broken"
    kept = f"head {report.head.number}:{report.head.hash}" if report.head.number else "nothing written yet"
    click.echo(f"workspace {report.workspace_id}: {verdict}, {report.entries} entries, {kept}")
    for fault in report.faults:
        click.echo(f"  {plain(fault)}")


def _head(text: str, workspace: UUID) -> AuditHead:
    """As it was typed or read from a file; what cannot be a hash accuses nobody of anything."""
    found = _KEPT.fullmatch(text.strip().lower())
    if found is None:
        raise click.BadParameter(
            "must be NUMBER:HASH with all 64 hexadecimal digits, as `ostler audit verify` prints it",
            param_hint="--kept-head",
        )
    return AuditHead(workspace_id=workspace, number=int(found[1]), hash=found[2])
