"""The table of keys. Reading, the sentences about mistakes, the JSON Schema and `explain` are all made from it."""

from __future__ import annotations

from dataclasses import dataclass

from ostler.agents.commandspec import ExitMeaning, PromptBy
from ostler.agents.files.forms import Form
from ostler.model.states import ProbeType

WORKTREE = "worktree"
ISOLATION_WORDS = ("none", "thread", "process", WORKTREE, "container")
RESTART_WORDS = ("no", "always", "on-failure", "immediate", "linear", "exponential")

_LIMITS = "defaults.resource_limits"
_RESTART = "defaults.restart_policy"
_HEALTH = "defaults.health_check"


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    name: str
    form: Form
    #: One sentence for a person who wonders what it does.
    says: str
    example: str = ""
    #: Where the value goes on the manifest (for a project: on the `Project`). Empty: kept as data for a later part.
    field: str = ""
    #: What the bounds of the field are counted in, where the number alone would mislead.
    unit: str = ""
    choices: tuple[str, ...] = ()
    keys: tuple[Key, ...] = ()
    each: Key | None = None
    #: Which names `each` stands under, and that in words; any, where there is none.
    names: str = ""
    names_hint: str = ""

    @property
    def by_name(self) -> dict[str, Key]:
        return {key.name: key for key in self.keys}


LIMITS = Key(
    name="limits",
    form=Form.KEYS,
    says="How much of the machine, of time and of money it may have.",
    example="{memory: 2G, time: 45m}",
    keys=(
        Key(
            name="memory",
            form=Form.SIZE,
            says="Memory of the agent and of what it starts.",
            example="2G",
            field=f"{_LIMITS}.max_memory_mb",
            unit="MB",
        ),
        Key(
            name="cpu",
            form=Form.PERCENT,
            says="Share of the processor; 0 is unlimited.",
            example="50%",
            field=f"{_LIMITS}.max_cpu_percent",
        ),
        Key(
            name="time",
            form=Form.DURATION,
            says="How long one request may take.",
            example="45m",
            field=f"{_LIMITS}.execution_timeout",
        ),
        Key(
            name="tokens",
            form=Form.COUNT,
            says="Tokens in a minute; 0 leaves it to the account.",
            example="2M",
            field=f"{_LIMITS}.max_tokens_per_minute",
        ),
        Key(
            name="cost", form=Form.MONEY, says="What one run may cost, in the currency of the account.", example="5.00"
        ),
        Key(
            name="tasks",
            form=Form.COUNT,
            says="Requests at the same time.",
            example="10",
            field=f"{_LIMITS}.max_concurrent_tasks",
        ),
        Key(
            name="threads",
            form=Form.COUNT,
            says="Worker threads of a Python agent.",
            example="4",
            field=f"{_LIMITS}.max_worker_threads",
        ),
    ),
)

RESTART = Key(
    name="restart",
    form=Form.RESTART,
    says="Whether a failed agent comes back, how often and how soon. The long form has the keys below.",
    example="on-failure:3",
    field=_RESTART,
    keys=(
        Key(
            name="policy",
            form=Form.CHOICE,
            choices=RESTART_WORDS,
            says="When it comes back. The last three are on-failure with that kind of delay.",
            example="on-failure",
            field=f"{_RESTART}.type",
        ),
        Key(
            name="max",
            form=Form.COUNT,
            says="Restarts since it was last healthy.",
            example="3",
            field=f"{_RESTART}.max_retries",
        ),
        Key(
            name="delay",
            form=Form.DURATION,
            says="Before the first restart.",
            example="1s",
            field=f"{_RESTART}.initial_delay",
        ),
        Key(
            name="max-delay",
            form=Form.DURATION,
            says="No delay is longer.",
            example="1m",
            field=f"{_RESTART}.max_delay",
        ),
        Key(
            name="multiplier",
            form=Form.NUMBER,
            says="By how much the delay grows each time.",
            example="2.0",
            field=f"{_RESTART}.backoff_multiplier",
        ),
        Key(
            name="jitter",
            form=Form.FLAG,
            says="Whether chance spreads the delays.",
            example="true",
            field=f"{_RESTART}.use_jitter",
        ),
        Key(
            name="breaker",
            form=Form.DURATION,
            says="Failing for so long without a pause ends the restarts.",
            example="5m",
            field=f"{_RESTART}.circuit_breaker_timeout",
        ),
    ),
)

HEALTHCHECK = Key(
    name="healthcheck",
    form=Form.KEYS,
    says="How it is found out whether the agent is well.",
    example="{heartbeat: 30s, retries: 3}",
    field=_HEALTH,
    keys=(
        Key(
            name="probe",
            form=Form.CHOICE,
            choices=tuple(ProbeType),
            says="What is asked.",
            example="http",
            field=f"{_HEALTH}.probe",
        ),
        Key(
            name="target",
            form=Form.TEXT,
            says="A URL for http, host:port for tcp, a command line for command.",
            example="http://localhost:8000/health",
            field=f"{_HEALTH}.target",
        ),
        Key(
            name="heartbeat",
            form=Form.DURATION,
            says="How often a heartbeat is asked for; another word for interval.",
            example="30s",
            field=f"{_HEALTH}.interval",
        ),
        Key(
            name="interval",
            form=Form.DURATION,
            says="How often the probe runs.",
            example="30s",
            field=f"{_HEALTH}.interval",
        ),
        Key(
            name="timeout",
            form=Form.DURATION,
            says="How long an answer may take.",
            example="3s",
            field=f"{_HEALTH}.timeout",
        ),
        Key(
            name="stall", form=Form.DURATION, says="Without any progress for so long it counts as stuck.", example="5m"
        ),
        Key(
            name="retries",
            form=Form.COUNT,
            says="Failures in a row until it is unhealthy.",
            example="3",
            field=f"{_HEALTH}.failure_threshold",
        ),
        Key(
            name="successes",
            form=Form.COUNT,
            says="Successes in a row until it is healthy again.",
            example="2",
            field=f"{_HEALTH}.success_threshold",
        ),
        Key(
            name="start-period",
            form=Form.DURATION,
            says="Failures so soon after a start do not count.",
            example="20s",
            field=f"{_HEALTH}.start_period",
        ),
    ),
)

DRIVER = Key(
    name="driver",
    form=Form.DRIVER,
    says="What runs it: an agent that speaks ACP, a command, or a class in Python.",
    example="acp:claude",
    keys=(
        Key(name="acp", form=Form.ACP, says="The name of an ACP driver.", example="claude"),
        Key(
            name="command",
            form=Form.COMMAND,
            says="A program with its arguments; it is started without a shell.",
            example='["aider", "--message-file", "{prompt_file}"]',
            field="command.argv",
        ),
        Key(name="python", form=Form.CLASS, says="A class, imported when it is first started.", example="my.mod:Fixer"),
    ),
)

LOOP = Key(
    name="loop",
    form=Form.KEYS,
    says="Runs it again with a fresh context until its work is done.",
    example="{max-iterations: 50, until: LOOP_COMPLETE}",
    keys=(
        Key(name="max-iterations", form=Form.COUNT, says="At most so many fresh starts.", example="50"),
        Key(name="until", form=Form.TEXT, says="The words by which the agent says that it is done.", example="DONE"),
        Key(name="gates", form=Form.TEXTS, says="Commands that must succeed.", example="[ruff check ., pytest -q]"),
        Key(name="wait", form=Form.TEXTS, says="What to wait for between two rounds.", example="[ci, pr-merge]"),
        Key(name="timeout", form=Form.DURATION, says="How long all rounds together may take.", example="1h"),
    ),
)

REVIEW = Key(
    name="review",
    form=Form.KEYS,
    says="How its work is held for review, and who accepts it.",
    example="{by: file, accept: human}",
    keys=(
        Key(name="by", form=Form.WORD, says="What is reviewed at a time.", example="file"),
        Key(name="accept", form=Form.CHOICE, choices=("human", "gates", "never"), says="Who accepts.", example="human"),
    ),
)

HOOKS = Key(
    name="hooks",
    form=Form.KEYS,
    says="Commands around the life of its workdir.",
    example="{after-create: uv sync}",
    keys=tuple(
        Key(name=name, form=Form.TEXT, says=f"A command that runs {when}; empty for none.", example="uv sync")
        for name, when in (
            ("after-create", "when the workdir was made"),
            ("before-run", "before each start"),
            ("after-run", "after each end"),
            ("before-remove", "before the workdir is removed"),
        )
    ),
)

TASKS = Key(
    name="tasks",
    form=Form.KEYS,
    says="Where its work comes from.",
    example="{from: github, label: agent, claim: assign}",
    keys=(
        Key(name="from", form=Form.WORD, says="The source.", example="github"),
        Key(name="label", form=Form.TEXT, says="Only what carries this label.", example="agent"),
        Key(name="claim", form=Form.WORD, says="How a task is marked as taken.", example="assign"),
    ),
)

LIFECYCLE = Key(
    name="lifecycle",
    form=Form.KEYS,
    says="Everything about an agent that is Ostler's. All other keys of the file belong to other tools.",
    keys=(
        DRIVER,
        Key(
            name="isolation",
            form=Form.CHOICE,
            choices=ISOLATION_WORDS,
            says="Where it lives. A worktree is a process with a git worktree of its own.",
            example=WORKTREE,
            field="defaults.isolation_level",
        ),
        Key(
            name="env",
            form=Form.NAMES,
            says="Names of variables that it may see; nothing else of the environment is passed.",
            example="[ANTHROPIC_API_KEY]",
            field="command.env",
        ),
        LIMITS,
        RESTART,
        HEALTHCHECK,
        LOOP,
        REVIEW,
        HOOKS,
        TASKS,
        Key(
            name="prompt",
            form=Form.CHOICE,
            choices=tuple(PromptBy),
            says="How a command is given its prompt.",
            example="stdin",
            field="command.prompt_by",
        ),
        Key(
            name="exit-codes",
            form=Form.NAMED,
            says="What the exit codes of a command mean; unless said, 0 is done and the rest failed.",
            example="{75: retry}",
            field="command.exit_codes",
            names="0|[1-9][0-9]?|1[0-9][0-9]|2[0-4][0-9]|25[0-5]",
            names_hint="an exit code from 0 to 255",
            each=Key(
                name="CODE", form=Form.CHOICE, choices=tuple(ExitMeaning), says="What the code means.", example="retry"
            ),
        ),
        Key(
            name="pty",
            form=Form.FLAG,
            says="Whether a command is given a terminal.",
            example="true",
            field="command.pty",
        ),
    ),
)
