"""The keys of a scenario file, in the form in which definition files keep theirs."""

from __future__ import annotations

from ostler.agents.files.forms import Form
from ostler.agents.files.keys import Key
from ostler.simulation.settings import OnFailure, OnIdle

#: Levels at which a brain can live as an instance of its own.
ISOLATION_WORDS = ("none", "thread", "process")
#: Mappings of the file that may hold anything; no form reads them.
FREE = ("parameters", "global_state")
#: The same of one group of agents.
FREE_OF_GROUP = ("params", "state")


def _setting(name: str, form: Form, example: str, says: str, choices: tuple[str, ...] = ()) -> Key:
    return Key(name=name, form=form, example=example, says=says, choices=choices, field=f"settings.{name}")


def _free(name: str, says: str) -> Key:
    return Key(name=name, form=Form.NAMED, says=says)


SETTINGS = Key(
    name="settings",
    form=Form.KEYS,
    says="How the run goes; every key has a default.",
    keys=(
        _setting("max_agents", Form.COUNT, "50", "How many there may be at a time."),
        _setting("decision_timeout", Form.DURATION, "30s", "How long one agent may think in one turn."),
        _setting("concurrency", Form.COUNT, "64", "How many may think at a time."),
        _setting("on_error", Form.CHOICE, "pause", "What becomes of one that raised.", tuple(OnFailure)),
        _setting("on_timeout", Form.CHOICE, "pause", "What becomes of one that thought too long.", tuple(OnFailure)),
        _setting("retries", Form.COUNT, "0", "How often one that failed is asked again in the same turn."),
        _setting("failure_pause_turns", Form.COUNT, "5", "When one that was paused for a failure goes on by itself."),
        _setting("on_idle", Form.CHOICE, "pass", "What becomes of a run in which nobody is active.", tuple(OnIdle)),
        _setting("snapshot_every", Form.COUNT, "50", "After how many turns the whole state is written down."),
    ),
)

BRAINS = Key(
    name="brains",
    form=Form.NAMED,
    says="What thinks for an agent of each kind: a class or a function that makes a brain.",
    example='trader = "economy:Trader"',
    each=Key(
        name="KIND",
        form=Form.CLASS,
        says="Where it stands; with keys, an ostler.Agent that lives as an instance of its own.",
        keys=(
            Key(name="agent", form=Form.CLASS, says="The class.", example="economy:RemoteTrader"),
            Key(
                name="isolation",
                form=Form.CHOICE,
                choices=ISOLATION_WORDS,
                says="Where it lives; a process of its own where nothing is said.",
                example="process",
            ),
        ),
    ),
)

GROUP = Key(
    name="agents",
    form=Form.KEYS,
    says="A list; each entry is some agents of one kind.",
    keys=(
        Key(name="name", form=Form.TEXT, says="The name; the second gets it with _1.", example="trader"),
        Key(name="kind", form=Form.TEXT, says="One of the brains.", example="trader"),
        Key(name="count", form=Form.COUNT, says="How many of them.", example="20"),
        _free("params", "What their brains are made with."),
        _free("state", "The state that they begin with."),
    ),
)

SCENARIO = Key(
    name="scenario",
    form=Form.KEYS,
    says="A run before it begins.",
    keys=(
        Key(name="name", form=Form.TEXT, says="The name of the scenario.", example="economy", field="name"),
        Key(name="turns", form=Form.COUNT, says="How many turns a run has.", example="100", field="turns"),
        Key(name="seed", form=Form.COUNT, says="Where chance begins.", example="7", field="seed"),
        Key(name="engine", form=Form.CLASS, says="What decisions do to the world.", example="economy:Market"),
        Key(name="state", form=Form.CLASS, says="The Pydantic model of states.", example="economy:TraderState"),
        SETTINGS,
        _free("parameters", "Whatever engine and brains want to be told."),
        _free("global_state", "What all agents share."),
        BRAINS,
        GROUP,
    ),
)
