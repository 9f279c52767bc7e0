import asyncio
import tempfile

import ostler


class Greeter(ostler.Agent):
    async def initialize(self, context: ostler.AgentContext) -> None:
        self.context = context

    async def process(self, request: dict[str, str]) -> dict[str, str]:
        return {"hello": request["name"], "from": self.context.name}


async def main(home: str) -> None:
    async with ostler.open(home) as manager:  # a directory, or a database address
        # What an agent is. The id is made from the name, so it is the same in every run.
        greeter = manager.registry.register(Greeter, name="greeter")

        # One life of it, in a thread of its own; if it dies it comes back.
        options = ostler.AgentSpawnOptions(
            name="ada",
            isolation_level=ostler.IsolationLevel.THREAD,
            restart_policy=ostler.RestartPolicy.default(),
        )
        ada = await manager.spawn(ostler.SpawnRequest(agent_definition_id=greeter.id, options=options))
        print(ada.name, "is", ada.state)

        print(await manager.process(ada.instance_id, {"name": "Ada"}))
        print((await manager.why(ada.instance_id)).verdict)

        # Asked first, forced if need be, and the answer says which it was.
        ended = await manager.terminate(ada.instance_id)
        print("graceful:", ended.was_graceful)

        # All of it is in a numbered log. The last number you saw is your cursor.
        async for event in manager.observe(ada.instance_id, after=0):
            if isinstance(event, ostler.AgentStateChangedEvent):
                print(event.sequence, event.previous_state, "to", event.new_state)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(main(home))
