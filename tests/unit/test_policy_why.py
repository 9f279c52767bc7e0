from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.durations import due, moment, since, span
from ostler.model.instance import AgentHealthStatus, AgentInstance, Why
from ostler.model.spawn import AgentSpawnOptions, ResourceLimits
from ostler.model.states import AgentState, HealthState, SuspendDepth
from ostler.model.wait import Wait, WaitKind
from ostler.policy.stall import StallFacts, judge_stall
from ostler.policy.why import MAX_QUOTE, WhyFacts, explain

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
ID = UUID(int=7)


def instance(state: AgentState, **fields: Any) -> AgentInstance:
    values = {"created_at": NOW - 10 * MINUTE, "updated_at": NOW, **fields}
    return AgentInstance(instance_id=ID, definition_id=UUID(int=1), workspace_id=UUID(int=2), state=state, **values)


def wait(kind: WaitKind, **fields: Any) -> Wait:
    values = {"created_at": NOW - 2 * MINUTE, **fields}
    return Wait(wait_id=UUID(int=3), workspace_id=UUID(int=2), instance_id=ID, kind=kind, **values)


def why(state: AgentState, *, of: dict[str, Any] | None = None, **facts: Any) -> Why:
    found = explain(WhyFacts(instance=instance(state, **(of or {})), now=NOW, **facts))
    assert found.state is state
    assert found.instance_id == ID
    assert found.validate()
    return found


def everything(found: Why) -> str:
    return "\n".join((found.verdict, *found.evidence, *found.what_would_change_it))


def test_one_that_starts_says_since_when_and_when_it_times_out() -> None:
    options = AgentSpawnOptions(initialization_timeout=3 * MINUTE)
    found = why(AgentState.INITIALIZING, of={"spawn_options": options, "attempt": 2}, state_since=NOW - MINUTE)
    assert found.verdict == "it is being started"
    assert found.evidence == (
        "being started since 2026-03-01 11:59:00+00:00, for 1 min",
        "this is its start number 2",
    )
    assert found.what_would_change_it[1] == (
        "it fails when that has not happened at 2026-03-01 12:02:00+00:00, in 2 min (time-out 3 min)"
    )


def test_one_that_starts_without_options_has_the_default_time_out() -> None:
    assert "(time-out 30 s)" in everything(why(AgentState.INITIALIZING))


def test_one_that_is_ready_has_nothing_to_do() -> None:
    found = why(AgentState.READY, state_since=NOW - MINUTE)
    assert found.verdict == "it is ready and has nothing to do"
    assert found.evidence == ("ready since 2026-03-01 11:59:00+00:00, for 1 min",)
    assert why(AgentState.READY, queued=2).verdict == "it is ready"


def test_one_that_works_says_on_how_much_and_since_when() -> None:
    options = AgentSpawnOptions(resource_limits=ResourceLimits(execution_timeout=5 * MINUTE))
    found = why(
        AgentState.PROCESSING,
        of={"spawn_options": options},
        in_flight=2,
        in_flight_since=NOW - MINUTE,
        queued=1,
    )
    assert found.verdict == "it works on 2 requests"
    assert found.evidence == (
        "2 requests in flight; the oldest since 2026-03-01 11:59:00+00:00, for 1 min",
        "1 request queued behind it",
    )
    assert found.what_would_change_it[1] == (
        "the oldest request is cancelled at 2026-03-01 12:04:00+00:00, in 4 min (execution time-out 5 min)"
    )


def test_one_that_waits_says_what_for() -> None:
    waits = (
        wait(WaitKind.HUMAN, reason="which\nbranch?"),
        wait(WaitKind.CI, due_at=NOW + MINUTE),
    )
    found = why(AgentState.WAITING, waits=waits)
    assert found.verdict == "it waits for an answer from a person, a CI run"
    assert found.evidence == (
        "waits for an answer from a person since 2026-03-01 11:58:00+00:00, for 2 min: which branch?",
        (
            "waits for a CI run since 2026-03-01 11:58:00+00:00, for 2 min, looks again at "
            "2026-03-01 12:01:00+00:00, in 1 min"
        ),
    )
    assert found.what_would_change_it[0] == "an answer ends its wait"


def test_one_that_waits_for_work_says_so() -> None:
    assert why(AgentState.WAITING).verdict == "it has worked and waits for the next request"


def test_many_waits_are_counted_not_listed() -> None:
    found = why(AgentState.WAITING, waits=tuple(wait(WaitKind.DEPENDENCY) for _ in range(50)))
    assert found.evidence[-1] == "and for 40 things more"
    assert len(found.evidence) == 11


def test_one_that_is_suspended_says_how_deep_since_when_and_until_when() -> None:
    found = why(
        AgentState.SUSPENDED,
        state_since=NOW - MINUTE,
        depth=SuspendDepth.FREEZE,
        reason="lunch",
        waits=(wait(WaitKind.RESUME, due_at=NOW + MINUTE),),
    )
    assert found.verdict == "it is frozen in mid-work"
    assert found.evidence[:2] == (
        "suspended since 2026-03-01 11:59:00+00:00, for 1 min",
        "the reason given: lunch",
    )
    assert found.what_would_change_it == (
        "it resumes by itself at 2026-03-01 12:01:00+00:00, in 1 min",
        "resuming it lets it go on where it was",
    )
    assert why(AgentState.SUSPENDED).what_would_change_it == ("resuming it lets it go on",)


@pytest.mark.parametrize("depth", SuspendDepth)
def test_every_depth_of_a_suspension_has_its_words(depth: SuspendDepth) -> None:
    assert why(AgentState.SUSPENDED, depth=depth).verdict != why(AgentState.SUSPENDED).verdict


@pytest.mark.parametrize("kind", WaitKind)
def test_every_wait_has_its_words(kind: WaitKind) -> None:
    assert why(AgentState.WAITING, waits=(wait(kind),)).verdict.startswith("it waits for ")


def test_one_that_is_terminating_says_when_force_comes() -> None:
    found = why(AgentState.TERMINATING, state_since=NOW - 4 * timedelta(seconds=1), grace=timedelta(seconds=10))
    assert found.verdict == "it is being terminated"
    assert found.what_would_change_it[1] == "it is forced at 2026-03-01 12:00:06+00:00, in 6 s (grace 10 s)"


@pytest.mark.parametrize(
    "facts",
    [{"restart_at": NOW + MINUTE}, {"waits": (wait(WaitKind.BACKOFF, due_at=NOW + MINUTE),)}],
    ids=["told", "by its wait"],
)
def test_one_that_failed_and_comes_back_says_when_and_why(facts: dict[str, Any]) -> None:
    found = why(
        AgentState.FAILED,
        of={"terminated_at": NOW, "error_message": "out of\nmemory", "restart_count": 1, "lifetime_restarts": 4},
        restart_sentence="restart 2 of 3 in 1 min",
        **facts,
    )
    assert found.verdict == "it failed and will be restarted"
    assert found.evidence == (
        "it failed at 2026-03-01 12:00:00+00:00",
        "its last error: out of memory",
        "restart 2 of 3 in 1 min",
        "restarts: 1 since it was last healthy, 4 in all",
    )
    assert found.what_would_change_it[0] == "it is restarted at 2026-03-01 12:01:00+00:00, in 1 min"


def test_one_that_failed_for_good_says_the_decision_and_the_way_out() -> None:
    found = why(AgentState.FAILED, restart_sentence="no restart: its policy is not to restart")
    assert found.verdict == "it failed and stays down"
    assert "no restart: its policy is not to restart" in found.evidence
    assert found.what_would_change_it[0] == "restarting it by hand gives it another start"


@pytest.mark.parametrize(
    ("graceful", "sentence"), [(True, "it ended when it was asked to"), (False, "it had to be forced")]
)
def test_one_that_is_gone_says_when_how_and_why(graceful: bool, sentence: str) -> None:
    found = why(AgentState.TERMINATED, of={"terminated_at": NOW - MINUTE}, was_graceful=graceful, reason="done")
    assert found.verdict == "it was terminated on purpose"
    assert found.evidence == (
        "it ended at 2026-03-01 11:59:00+00:00, after 9 min",
        sentence,
        "the reason given: done",
    )
    assert found.what_would_change_it == ("nothing; spawn a new instance",)


def test_a_stall_goes_before_all_else() -> None:
    long = NOW - 10 * MINUTE
    stall = judge_stall(StallFacts(state=AgentState.PROCESSING, now=NOW, in_flight_since=long, last_cpu_change=long))
    found = why(AgentState.PROCESSING, in_flight=1, in_flight_since=long, stall=stall)
    assert found.verdict == "it is stalled: it owes work and shows no sign of life"
    assert set(stall.evidence) <= set(found.evidence)
    assert stall.remedy in found.what_would_change_it


def test_one_that_does_not_answer_is_not_called_stalled() -> None:
    stall = judge_stall(
        StallFacts(state=AgentState.PROCESSING, now=NOW, in_flight_since=NOW - 10 * MINUTE, last_output=NOW)
    )
    assert why(AgentState.PROCESSING, stall=stall).verdict == "it is working, but it does not answer"


def test_sickness_is_told_of_the_living_only() -> None:
    sick = AgentHealthStatus(
        state=HealthState.UNHEALTHY, consecutive_failures=3, checked_at=NOW, details="HTTP status 503"
    )
    found = why(AgentState.READY, of={"health": sick})
    assert found.verdict == "it is ready and has nothing to do, but it is unhealthy"
    assert "health: unhealthy, 3 failed probes in a row, looked at 2026-03-01 12:00:00+00:00" in found.evidence
    assert "the latest probe said: HTTP status 503" in found.evidence
    assert "unhealthy" not in everything(why(AgentState.TERMINATED, of={"health": sick}))


def test_one_that_is_half_sick_says_so_without_alarm() -> None:
    half = AgentHealthStatus(state=HealthState.DEGRADED, consecutive_failures=1)
    found = why(AgentState.READY, of={"health": half})
    assert found.verdict == "it is ready and has nothing to do"
    assert found.evidence == ("health: degraded, 1 failed probe in a row",)


def test_foreign_words_are_cut() -> None:
    found = why(AgentState.FAILED, of={"error_message": "x" * 10_000})
    assert max(map(len, found.evidence)) < MAX_QUOTE + 100


MOMENTS = st.none() | st.timedeltas(timedelta(days=-900), timedelta(days=900)).map(lambda gap: NOW + gap)


@given(
    st.sampled_from(AgentState),
    st.fixed_dictionaries(dict.fromkeys(("state_since", "in_flight_since", "restart_at"), MOMENTS)),
    st.lists(st.sampled_from(WaitKind), max_size=12),
    MOMENTS,
    st.text(st.characters(), max_size=50),
)
def test_every_state_has_an_answer_of_whole_lines_wherever_the_clock_stands(
    state: AgentState,
    moments: dict[str, datetime | None],
    kinds: list[WaitKind],
    due_at: datetime | None,
    words: str,
) -> None:
    waits = tuple(wait(kind, due_at=due_at, created_at=due_at or NOW, reason=words) for kind in kinds)
    of = {"created_at": due_at or NOW, "terminated_at": moments["state_since"], "error_message": words}
    found = why(state, of=of, waits=waits, in_flight=1, reason=words, grace=MINUTE, **moments)
    assert found.verdict
    assert found.what_would_change_it
    assert all(line and len(line.splitlines()) == 1 for line in everything(found).split("\n"))


@pytest.mark.parametrize(
    ("length", "text"),
    [
        (timedelta(seconds=-5), "less than 1 s"),
        (timedelta(milliseconds=999), "less than 1 s"),
        (timedelta(seconds=59.9), "59 s"),
        (timedelta(seconds=60), "1 min"),
        (timedelta(seconds=61), "1 min 1 s"),
        (timedelta(hours=1, seconds=1), "1 h"),
        (timedelta(hours=1, minutes=2, seconds=3), "1 h 2 min"),
        (timedelta(days=3, hours=4, minutes=5), "3 d 4 h"),
    ],
)
def test_durations_are_told_in_two_units(length: timedelta, text: str) -> None:
    assert span(length) == text


def test_a_clock_that_was_set_back_is_said_not_computed_with() -> None:
    later = NOW + MINUTE
    assert since(later, NOW) == f"since {moment(later)} (the clock has been set back since)"
    assert since(NOW, NOW) == f"since {moment(NOW)}, for less than 1 s"
    assert due(NOW - MINUTE, NOW) == f"at {moment(NOW - MINUTE)}, which was 1 min ago"


@pytest.mark.parametrize("state", AgentState)
def test_what_holds_a_restart_back_and_what_went_wrong_are_told_in_every_state(state: AgentState) -> None:
    told = why(state, held_because="the plan is\nfull", problem="x" * 1000).evidence
    assert told[-2] == "the plan is full"
    assert told[-1].startswith("xxx")
    assert told[-1].endswith("more characters)")
