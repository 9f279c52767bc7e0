"""What Ostler does today, with real processes, in a few seconds: run it with `make demo`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import ostler
from worker import Worker

HERE = Path(__file__).resolve().parent


def say(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


async def first_manager(home: str) -> None:
    """Runs in a program of its own, which is killed in the middle of its work."""
    async with ostler.open(home) as manager:
        ada = await manager.start(Worker, name="ada", isolation="process", memory="256M", restart="immediate")
        say("An agent in a process of its own")
        print(await ada.ask({"do": "count"}))

        say("It is killed; its record says so, and its policy brings it back")
        try:
            await ada.ask({"do": "die"})
        except ostler.AgentGoneError as error:
            print(f"AgentGoneError: {error}")
        print(await ada.ask({}))

        say("It asks a person, and waits without using anything")
        asking = asyncio.create_task(ada.ask({"do": "ask"}))
        while not (waits := await manager.open_waits()):  # noqa: ASYNC110 - a demo may look
            await asyncio.sleep(0.02)
        print("waits:", waits[0].reason, "|", (await ada.why()).verdict)
        await manager.answer(waits[0].wait_id, "yes")
        print(await asking)

        say("It is frozen in the middle of its work, and goes on where it was")
        working = asyncio.create_task(ada.ask({"do": "count"}))
        await asyncio.sleep(0.1)
        print((await ada.pause("freeze")).state)
        await ada.resume()
        print(await working)

        say("The manager is killed with kill -9 in the middle of a request")
        request = asyncio.create_task(ada.ask({"do": "sleep"}, id="night-shift"))
        await asyncio.sleep(0.3)
        print("state:", (await ada.record()).state, flush=True)
        del request
        os.kill(os.getpid(), signal.SIGKILL)


async def second_manager(home: str) -> None:
    async with ostler.open(home) as manager:
        say("The next manager finds the agent at work, and gets the answer of the same request")
        ada = manager.handle("ada")
        print(await ada.ask({"do": "sleep"}, id="night-shift"))
        print("asked again:", await ada.ask({"do": "sleep"}, id="night-shift"))
        result = await ada.stop(reason="the demo is over")
        print("stopped gracefully:", result.was_graceful)


def ostler_command(*words: str) -> None:
    print(f"$ ostler {' '.join(words)}")
    subprocess.run([sys.executable, "-m", "ostler", *words], check=False)


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        os.environ["OSTLER_HOME"] = home
        subprocess.run([sys.executable, __file__, "first", home], check=False, cwd=HERE)
        asyncio.run(second_manager(home))
        say("Everything is in one durable record")
        ostler_command("ps", "-a")
        ostler_command("events", "ada", "-n", "5")
        ostler_command("audit", "verify")


if __name__ == "__main__":
    if sys.argv[1:2] == ["first"]:
        asyncio.run(first_manager(sys.argv[2]))
    else:
        main()
