import asyncio
import tempfile
from uuid import uuid4

from ostler import AgentSpawnOptions, AgentState, MoveInstance, ReserveInstance, SpawnRequest, open_store


async def main(home: str) -> None:
    async with open_store(home) as store:
        # Intent first: the record exists, durably, before anything is started.
        request = SpawnRequest(agent_definition_id=uuid4(), options=AgentSpawnOptions(name="ada", tags=("docs",)))
        ada = await store.commit(ReserveInstance(request=request))

        # The one way from state to state. An illegal move raises, and names both states.
        ready = await store.commit(MoveInstance(instance_id=ada.instance_id, to=AgentState.READY))
        print(ready.name, ready.state, "version", ready.version)

        # The log is numbered in commit order; the last number you saw is your cursor.
        async for event in store.replay(after=0):
            print(event.sequence, event.event_type)

        # Everything done is in a chain of hashes; an edited row would be named here.
        print("audit:", (await store.verify_audit()).is_sound)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(main(home))
