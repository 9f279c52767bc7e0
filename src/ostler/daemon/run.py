"""The composition root: lock, manager, API, listeners, signals; and the orderly end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ostler.api.app import create_app
from ostler.api.context import Context
from ostler.client.homes import note_home
from ostler.crews.projects import ProjectCrews
from ostler.daemon.hooks import Hooks
from ostler.daemon.listen import STREAM_SECONDS, Listener, address_of, tcp_socket, unix_socket
from ostler.daemon.log import configure_log
from ostler.definitions.project import ConfigFile, ProjectSettings, load_settings
from ostler.errors import DefinitionError, LeaseHeldError, OstlerError, ValidationError
from ostler.home import LOCK_FILE, SOCKET_FILE, TOKEN_VARIABLE, chosen_home, modules_of, project_of
from ostler.isolation.base import DEFAULT_NAMES
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.lifecycle.open import open_manager
from ostler.lifecycle.settings import LifecycleSettings
from ostler.loop.service import Loops
from ostler.model.access import OWNER
from ostler.model.instance import AgentInstance
from ostler.model.query import GetInstancesFilter
from ostler.model.spawn import TerminationOptions
from ostler.model.states import AgentState
from ostler.tasks.attempt import DAEMON_STOPPED
from ostler.tasks.orchestrator import TaskOrchestrator
from ostler.tasks.queue import TaskQueue
from ostler.version import __version__

_log = logging.getLogger("ostler.daemon")
#: How long agents go on without their daemon.
OUTLIVE = timedelta(days=7)
#: How often it is looked whether the home is still there.
_LOOK_SECONDS = 1.0


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="ostler up", description="Run the daemon of a home.")
    parser.add_argument("--home", help="the home; see `ostler status`")
    parser.add_argument("--listen", metavar="HOST:PORT", help="also listen on loopback TCP, with tokens")
    parser.add_argument("--strict", action="store_true", help="do not start where the settings or the port are wrong")
    chosen = parser.parse_args(arguments)
    home = chosen_home(chosen.home)
    configure_log(home)
    note_home(home)
    try:
        asyncio.run(serve(home, listen=chosen.listen, strict=chosen.strict))
    except OstlerError as error:
        print(f"ostler: {error}", file=sys.stderr)  # noqa: T201 - the program's own last word
        # Where another daemon has the home, systemd must not try again and again: see `client/boot.py`.
        sys.exit(2 if isinstance(error, ValidationError) else 7 if isinstance(error, LeaseHeldError) else 1)


def _try_tcp_socket(address: str | None) -> tuple[socket.socket | None, str | None]:
    """The socket, or why there is none."""
    try:
        return None if address is None else tcp_socket(address), None
    except ValidationError as error:
        _log.warning("%s", error)
        return None, f"{error}; it listens only on the socket of the home"


def check_start(home: Path, listen: str | None, in_use: Collection[str] = ()) -> None:
    """Raise what would keep a daemon from starting: a fault of the settings, an address that cannot be had.

    `in_use` are the addresses of the daemon that makes room.
    """
    address = listen or load_settings(project_of(home)).daemon.listen
    if address is not None and f"http://{address}" not in in_use:
        tcp_socket(address).close()


class _Settings:
    """The settings that are in force, and what is wrong with those that are not."""

    def __init__(self, home: Path, listen: str | None) -> None:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.config = ConfigFile(project_of(home))
        #: The file was never good, so nothing is known of what the user wants.
        self.are_defaults = False
        try:
            self.now = self.config()
        except DefinitionError as error:
            _log.warning("%s", error)
            self.now, self.are_defaults = ProjectSettings(), True
        self.tcp, self._port_fault = _try_tcp_socket(listen or self.now.daemon.listen)

    def fault(self) -> str | None:
        with contextlib.suppress(DefinitionError):
            self.config()
        if self.config.trouble is None:
            return self._port_fault
        in_force = "defaults are in force, and no task is begun" if self.are_defaults else "last good ones are in force"
        return f"{self.config.trouble}; the {in_force}"


async def serve(home: Path, *, listen: str | None = None, strict: bool = False) -> None:
    """Serve until a signal comes, or the API stops it.

    Unless `strict`, faults of the settings are told and do not keep it from starting: a user must be able to look at
    agents and to end them.
    """
    os.environ.pop(TOKEN_VARIABLE, None)  # agents at the levels none and thread would find it
    modules = str(modules_of(home))
    if modules not in sys.path:
        sys.path.append(modules)  # classes of the project's own agents; last, so that it hides nothing
    if strict:
        check_start(home, listen)
    in_force = _Settings(home, listen)
    settings, tcp = in_force.now, in_force.tcp
    async with open_manager(home, settings=_lifecycle_settings(settings)) as manager:

        def stop(keep: bool) -> None:
            manager.keep_agents = keep
            context.stopping.set()

        async def end_agents() -> list[dict[str, Any]]:
            queue.draining = hooks.is_stopping = True
            crews.drain(DAEMON_STOPPED)
            return await _end_agents(manager)

        manager.projects.home.config = in_force.config
        orchestrator = TaskOrchestrator(manager, settings=settings.tasks)
        loops = Loops(orchestrator, settings.loop)
        crews = ProjectCrews(orchestrator, loops)
        queue = TaskQueue(
            orchestrator,
            selects=lambda task: task.agent is not None and not crews.owns(task),
            rules=loops.rules,
            settle=loops.settle,
        )
        crews.on_settings = queue.wake
        context = Context(
            manager=manager,
            orchestrator=orchestrator,
            loops=loops,
            crews=crews,
            home=home,
            started_at=datetime.now(UTC),
            stop=stop,
            end_agents=end_agents,
            settings_fault=in_force.fault,
        )
        manager.projects.home.refresh()
        queue.draining = in_force.are_defaults
        hooks = Hooks(orchestrator, settings.daemon, settings.tasks.on_change)
        app = create_app(context)
        sockets = [unix_socket(home)] + ([tcp] if tcp is not None else [])
        listeners = [Listener(app, sock, manager, hooks.running) for sock in sockets]
        context.listens = [str(home / SOCKET_FILE)] + ([address_of(tcp)] if tcp is not None else [])
        with _signals(stop, lambda: context.run(crews.reload())):
            await crews.prepare()
            await crews.open(await queue.open())
            hooks.start()
            running = [asyncio.create_task(listener.run()) for listener in listeners]
            watch = asyncio.create_task(_stop_without_home(home, stop))
            _log.info("ostler %s, pid %d, home %s, listening on %s", __version__, os.getpid(), home, context.listens)
            await asyncio.wait(
                [asyncio.create_task(context.stopping.wait()), *running], return_when=asyncio.FIRST_COMPLETED
            )
            watch.cancel()
            hooks.is_stopping = True
            if not manager.keep_agents:
                await end_agents()
            for part in (crews, queue, orchestrator, hooks):
                await part.close()
            for listener in listeners:
                listener.stop()
            await asyncio.wait(running, timeout=STREAM_SECONDS + 3)
            for task in context.tasks:
                task.cancel()
        with contextlib.suppress(OSError):
            (home / SOCKET_FILE).unlink()
    _log.info("stopped%s", "; its agents live on" if manager.keep_agents else "")


def _lifecycle_settings(settings: ProjectSettings) -> LifecycleSettings:
    environment = DEFAULT_NAMES if settings.daemon.environment is None else settings.daemon.environment
    return LifecycleSettings(
        outlive=OUTLIVE,
        retention=settings.retention,
        environment=environment,
        output_rate=settings.daemon.output_rate,
    )


async def _stop_without_home(home: Path, stop: Callable[[bool], None]) -> None:
    """A home that is deleted takes its agents along: no command could reach them any more. After a move the next daemon
    goes on at the new place; this one, and its agents, would write at the old one.
    """
    lock = os.open(home / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while _is_in_place(lock, home):  # noqa: ASYNC110 - the file system tells no one
            await asyncio.sleep(_LOOK_SECONDS)
        what = "moved away" if os.fstat(lock).st_nlink else "deleted"
    finally:
        os.close(lock)
    _log.error("the home %s was %s; ending its agents and this daemon", home, what)
    stop(False)


def _is_in_place(lock: int, home: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), (home / LOCK_FILE).stat())
    except FileNotFoundError:
        return False
    except OSError:
        return True  # it cannot be looked at now


async def _end_agents(manager: AgentLifecycleManager) -> list[dict[str, Any]]:
    """In order, while the API still answers, so that a client sees them end. Suspended ones are parked by the close."""
    instances = await manager.acting_as(OWNER).get_active_instances(GetInstancesFilter(limit=1000))
    if instances:
        _log.info("stopping %d agents", len(instances))

    async def end(instance: AgentInstance) -> dict[str, Any]:
        try:
            result = await manager.terminate(instance.instance_id, TerminationOptions(reason=DAEMON_STOPPED))
        except OstlerError as error:
            _log.warning("%s: %s", instance.name, error)
            return {"name": instance.name, "how": f"could not be ended: {error}"}
        manner = "gracefully" if result.was_graceful else "by force"
        how = f"terminated {manner} in {result.duration.total_seconds():.1f} s"
        _log.info("%s %s", instance.name, how)
        return {"name": instance.name, "how": how}

    suspended = [instance for instance in instances if instance.state == AgentState.SUSPENDED]
    parked = [{"name": instance.name, "how": "parked"} for instance in suspended]
    return parked + await asyncio.gather(*(end(instance) for instance in instances if instance not in suspended))


@contextlib.contextmanager
def _signals(stop: Any, reload: Callable[[], object]) -> Iterator[None]:
    """SIGINT and SIGTERM stop the agents in order; a second one ends at once. SIGHUP reads the settings again."""
    loop, seen = asyncio.get_running_loop(), 0

    def on_signal() -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            _log.warning("a second signal; ending now, agents are left to the next daemon")
            os._exit(1)
        _log.info("a signal to stop; press Ctrl+C again to end at once")
        stop(False)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
