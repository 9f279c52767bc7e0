"""The first example of the README."""

import asyncio
import tempfile

import ostler


class Greeter(ostler.Agent):
    async def process(self, request: dict[str, str]) -> str:
        return f"Hello {request['who']}"


async def main(home: str) -> None:
    async with ostler.open(home) as manager:
        ada = await manager.start(Greeter, name="ada", isolation="process", memory="256M", restart="exponential")
        print(await ada.ask({"who": "you"}, id="r-1", timeout="30s"))
        print((await ada.why()).verdict)
        result = await ada.stop(reason="done")
        print("graceful:", result.was_graceful)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(main(home))
