from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.model.states import AgentState
from ostler.policy.stall import Liveness, StallFacts, StallVerdict, judge_stall

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
LIMIT = timedelta(minutes=5)
LONG, SHORT = NOW - timedelta(minutes=6), NOW - timedelta(seconds=3)
SILENT: dict[str, Any] = {
    "state": AgentState.PROCESSING,
    "now": NOW,
    "in_flight_since": NOW - timedelta(hours=1),
    "last_heartbeat": LONG,
    "last_output": LONG,
    "last_cpu_change": LONG,
    "stall_after": LIMIT,
}


def judged(**facts: Any) -> StallVerdict:
    return judge_stall(StallFacts(**{**SILENT, **facts}))


def test_an_agent_that_owes_work_and_shows_nothing_is_stalled() -> None:
    verdict = judged()
    assert verdict.stalled
    assert verdict.verdict is Liveness.STALLED
    assert verdict.evidence == (
        "a request has been in flight for 1 h",
        "no heartbeat for 6 min; the limit is 5 min",
        "no output for 6 min; the limit is 5 min",
        "no use of CPU for 6 min; the limit is 5 min",
    )
    assert "restart" in verdict.remedy


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"last_heartbeat": SHORT, "last_output": SHORT, "last_cpu_change": SHORT}, Liveness.WORKING),
        ({"last_heartbeat": SHORT, "last_output": SHORT}, Liveness.WORKING),
        ({"last_heartbeat": SHORT, "last_cpu_change": SHORT}, Liveness.WORKING),
        ({"last_heartbeat": SHORT}, Liveness.QUIET),
        ({"last_heartbeat": SHORT, "last_cpu_change": None}, Liveness.QUIET),
        ({"last_output": SHORT}, Liveness.UNRESPONSIVE),
        ({"last_cpu_change": SHORT}, Liveness.UNRESPONSIVE),
        ({"last_cpu_change": None}, Liveness.UNRESPONSIVE),
        ({"last_heartbeat": None, "last_output": None}, Liveness.STALLED),
        ({"stall_after": None}, Liveness.WORKING),
        ({"stall_after": timedelta(0)}, Liveness.WORKING),
        ({"stall_after": timedelta(seconds=-1)}, Liveness.WORKING),
        ({"in_flight_since": None}, Liveness.IDLE),
        ({"waits": True}, Liveness.WAITING),
        ({"frozen": True}, Liveness.HELD),
        ({"held": True}, Liveness.HELD),
        ({"state": AgentState.INITIALIZING}, Liveness.STARTING),
        ({"state": AgentState.READY}, Liveness.IDLE),
        ({"state": AgentState.WAITING}, Liveness.WAITING),
        ({"state": AgentState.WAITING, "in_flight_since": None}, Liveness.IDLE),
        ({"state": AgentState.SUSPENDED}, Liveness.HELD),
        ({"state": AgentState.TERMINATING}, Liveness.ENDING),
        ({"state": AgentState.TERMINATED}, Liveness.ENDED),
        ({"state": AgentState.FAILED}, Liveness.ENDED),
    ],
)
def test_the_verdict_in_one_word(facts: dict[str, Any], verdict: Liveness) -> None:
    found = judged(**facts)
    assert found.verdict is verdict
    assert found.stalled == (verdict is Liveness.STALLED)
    assert found.evidence


def test_it_is_stalled_at_the_limit_and_not_before() -> None:
    at = NOW - LIMIT
    before = at + timedelta(microseconds=1)
    assert judged(last_heartbeat=at, last_output=at, last_cpu_change=at).stalled
    for sign in ("last_heartbeat", "last_output", "last_cpu_change"):
        assert not judged(**{sign: before}).stalled


def test_work_that_has_just_begun_excuses_an_old_silence() -> None:
    found = judged(in_flight_since=SHORT, last_heartbeat=None, last_output=None)
    assert found.verdict is Liveness.WORKING
    assert found.evidence[1:3] == ("no heartbeat yet", "no output yet")


def test_the_time_that_it_was_frozen_does_not_count_after_the_thaw() -> None:
    assert not judged(state_since=SHORT).stalled
    assert judged(state_since=LONG).stalled


def test_a_clock_that_was_set_back_makes_nobody_look_silent() -> None:
    later = NOW + timedelta(hours=1)
    ahead = judged(in_flight_since=later, last_heartbeat=later, last_output=later, last_cpu_change=later)
    assert ahead.verdict is Liveness.WORKING
    assert ahead.evidence[0] == "a request has been in flight for less than 1 s"
    assert not judged(state_since=later).stalled
    assert not judged(last_cpu_change=later).stalled


MOMENTS = st.none() | st.timedeltas(timedelta(hours=-2), timedelta(hours=2)).map(lambda gap: NOW + gap)


@given(
    st.sampled_from(AgentState),
    st.fixed_dictionaries(
        {name: MOMENTS for name in SILENT if name.startswith("last_")}
        | {"in_flight_since": MOMENTS, "state_since": MOMENTS}
    ),
    st.fixed_dictionaries({name: st.booleans() for name in ("frozen", "held", "waits")}),
)
def test_nobody_is_called_stalled_who_has_any_excuse(
    state: AgentState, moments: dict[str, datetime | None], flags: dict[str, bool]
) -> None:
    found = judged(state=state, **moments, **flags)
    if found.stalled:
        assert state is AgentState.PROCESSING
        assert not any(flags.values())
        assert moments["last_cpu_change"] is not None
        assert all(seen is None or NOW - seen >= LIMIT for seen in moments.values())
        assert moments["in_flight_since"] is not None
