"""The composition root: lock, manager, API, listeners, signals; and the orderly end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ostler.api.app import create_app
from ostler.api.context import Context
from ostler.api.gate import Gate
from ostler.api.routes.loops import PEER
from ostler.crews.supervisor import Supervisor
from ostler.daemon.hooks import Hooks
from ostler.definitions import Discovery, register_files
from ostler.definitions.project import ConfigFile
from ostler.errors import OstlerError, ValidationError
from ostler.home import SOCKET_FILE, chosen_home, modules_of, project_of
from ostler.isolation.base import DEFAULT_NAMES
from ostler.lifecycle.manager import AgentLifecycleManager
from ostler.lifecycle.open import open_manager
from ostler.lifecycle.settings import LifecycleSettings
from ostler.loop.loops import Loops
from ostler.model.access import OWNER
from ostler.model.instance import AgentInstance
from ostler.model.query import GetInstancesFilter
from ostler.model.spawn import TerminationOptions
from ostler.model.states import AgentState
from ostler.model.validation import fault
from ostler.tasks.attempt import DAEMON_STOPPED
from ostler.tasks.orchestrator import TaskOrchestrator
from ostler.tasks.queue import TaskQueue
from ostler.version import __version__

_log = logging.getLogger("ostler.daemon")
#: How long agents go on without their daemon.
OUTLIVE = timedelta(days=7)
#: Open streams end with the daemon; they get this long.
_STREAM_SECONDS = 2
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="ostler up", description="Run the daemon of a home.")
    parser.add_argument("--home", help="the home; see `ostler status`")
    parser.add_argument("--listen", metavar="HOST:PORT", help="also listen on loopback TCP, with tokens")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s  %(levelname)-7s  %(message)s", datefmt="%Y-%m-%d %H:%M:%S", force=True
    )
    for name in ("uvicorn", "watchfiles"):  # they log every request and every change of a file
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        asyncio.run(serve(chosen_home(chosen.home), listen=chosen.listen))
    except OstlerError as error:
        print(f"ostler: {error}", file=sys.stderr)  # noqa: T201 - the program's own last word
        sys.exit(2 if isinstance(error, ValidationError) else 1)


async def serve(home: Path, *, listen: str | None = None) -> None:
    """Serve until a signal comes, or the API stops it."""
    project, modules = project_of(home), str(modules_of(home))
    if modules not in sys.path:
        sys.path.append(modules)  # classes of the project's own agents; last, so that it hides nothing
    config = ConfigFile(project)
    settings = config()
    address = listen or settings.daemon.listen
    tcp = None if address is None else _tcp_socket(address)
    environment = DEFAULT_NAMES if settings.daemon.environment is None else settings.daemon.environment
    lifecycle = LifecycleSettings(outlive=OUTLIVE, retention=settings.retention, environment=environment)
    async with open_manager(home, settings=lifecycle) as manager:

        def stop(keep: bool) -> None:
            manager.keep_agents = keep
            context.stopping.set()

        async def end_agents() -> list[dict[str, Any]]:
            queue.draining = True
            supervisor.drain(DAEMON_STOPPED)
            return await _end_agents(manager)

        orchestrator = TaskOrchestrator(manager, settings=settings.tasks)
        loops = Loops(orchestrator, settings.loop)
        supervisor = Supervisor(orchestrator, get_config=config, refresh=lambda: _refresh(manager, project))
        queue = TaskQueue(
            orchestrator,
            wanted=lambda task: task.agent is not None and not supervisor.owns(task),
            rules=loops.rules,
            settle=loops.settle,
        )
        supervisor.on_settings = queue.wake
        context = Context(
            manager=manager,
            orchestrator=orchestrator,
            loops=loops,
            supervisor=supervisor,
            home=home,
            started_at=datetime.now(UTC),
            stop=stop,
            end_agents=end_agents,
            refresh=lambda: _refresh(manager, project),
        )
        context.refresh()
        hooks = Hooks(manager, settings.daemon.on_wait, settings.tasks.on_change)
        listeners = [(_unix_socket(home), True)] + ([(tcp, False)] if tcp is not None else [])
        app = create_app(context)
        servers = [_Server(app, sock, manager, is_local=is_local) for sock, is_local in listeners]
        context.listens = [str(home / SOCKET_FILE)] + ([_address_of(tcp)] if tcp is not None else [])
        with _signals(stop, lambda: context.run(supervisor.reload())):
            await supervisor.open(await queue.open())
            hooks.start()
            running = [asyncio.create_task(server.run()) for server in servers]
            _log.info("ostler %s, pid %d, home %s, listening on %s", __version__, os.getpid(), home, context.listens)
            await asyncio.wait(
                [asyncio.create_task(context.stopping.wait()), *running], return_when=asyncio.FIRST_COMPLETED
            )
            if not manager.keep_agents:
                await end_agents()
            await supervisor.close()
            await queue.close()
            await orchestrator.close()
            await hooks.close()
            for server in servers:
                server.server.should_exit = True
            await asyncio.wait(running, timeout=_STREAM_SECONDS + 3)
            for task in context.tasks:
                task.cancel()
        with contextlib.suppress(OSError):
            (home / SOCKET_FILE).unlink()
    _log.info("stopped%s", "; its agents live on" if manager.keep_agents else "")


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


def _refresh(manager: AgentLifecycleManager, root: Path) -> Discovery:
    """Definition files as they are now; a file that changed applies to the next spawn."""
    return register_files(manager.registry, root, user=Path.home(), replace=True)


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


# --- listeners ---------------------------------------------------------------------------------------


class _PeerChecked(H11Protocol):
    """Only the user of the daemon, and root, may speak to its socket; whatever the file's rights say."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", credentials)
        self.client = (PEER, pid)  # who speaks, for the routes that must know it
        if uid not in {0, os.getuid()}:
            _log.warning("refused a connection of user %d", uid)
            transport.abort()


class _Server:
    def __init__(self, app: Any, sock: socket.socket, manager: AgentLifecycleManager, *, is_local: bool) -> None:
        gate = Gate(app, manager, is_local_socket=is_local)
        config = uvicorn.Config(
            gate,
            http=_PeerChecked if is_local else H11Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_STREAM_SECONDS,
        )
        self.server = _Quiet(config)
        self._sock = sock

    async def run(self) -> None:
        await self.server.serve(sockets=[self._sock])


class _Quiet(uvicorn.Server):
    """Leaves the signals to the daemon."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _unix_socket(home: Path) -> socket.socket:
    path = home / SOCKET_FILE
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # the lock of the home is held, so no daemon listens there
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    before = os.umask(0o177)
    try:
        sock.bind(f"/proc/self/fd/{folder}/{SOCKET_FILE}")  # an address holds no more than 107 bytes
    finally:
        os.umask(before)
        os.close(folder)
    sock.listen(128)
    return sock


def _address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _tcp_socket(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    name = host.strip("[]") or "127.0.0.1"
    if name not in _LOOPBACK or not port.isdecimal():
        raise fault("listen", "must be a loopback address such as 127.0.0.1:7177; other addresses are refused", address)
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1" if name == "localhost" else name, int(port)))
    except OSError as error:
        sock.close()
        raise fault("listen", f"cannot be used ({error.strerror}); choose another port", address) from error
    return sock
