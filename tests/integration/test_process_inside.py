"""An agent in a process of its own, driven as its manager drives it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from inside_agents import directory, shared, template
from inside_ground import ENVIRONMENT, EPOCH, INSTANCE, KEY, Template, until

from ostler.agent_process import framing

__all__ = ["directory", "shared", "template"]


def test_a_template_is_fit_to_be_forked(shared: Template) -> None:
    place = Path(f"/proc/{shared.process.pid}")
    until(lambda: len(list((place / "fd").iterdir())) <= 4)  # stdio and the keeper, once it has given its spare away
    assert len(list((place / "task").iterdir())) == 1


# --- what is in the process --------------------------------------------------------------------------


def test_a_call_is_answered(template: Template) -> None:
    agent = template.start("Scripted")
    assert agent.ask(verb="initialize")["ok"] is None
    assert agent.ask({"do": "echo", "value": {"a": [1, None, "ä"]}})["ok"] == {"a": [1, None, "ä"]}
    assert agent.ask(verb="final_state")["ok"] is None
    assert agent.ask(verb="dance")["error"]["message"].endswith("cannot be asked to 'dance'")


def test_an_agent_knows_itself_and_holds_nothing_of_others(template: Template) -> None:
    told = []
    for _ in range(2):
        agent = template.start("Scripted")
        agent.ask(verb="initialize")
        told.append(agent.ask({"do": "about"})["ok"] | {"pid": agent.pid})
    one, other = told
    assert (one["instance"], one["data"]) == (INSTANCE, {"Colour": "red"})
    assert one["limits"] == [2, 90.0]
    assert one["environment"] == {**ENVIRONMENT, "MARK": "of the agent"}
    assert (one["session"], one["parent"]) == (one["pid"], os.getpid())
    assert one["stdin"] == ""
    assert one["dice"] != other["dice"]
    # Besides stdio: the socket it listens on, the channel, and the loop's own three.
    kinds = sorted(target.split(":")[0] for number, target in other["fds"].items() if int(number) > 2)
    assert kinds == ["anon_inode", *["socket"] * 4]


def test_what_is_printed_goes_to_the_log_and_nowhere_else(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    assert agent.ask({"do": "noise"})["ok"] == "quiet"
    agent.tell({"t": "stop"})
    assert agent.wait() == 0
    assert agent.output() == "to whom it may concern\n" + "raw " * 10_000 + "\n"


def test_nested_classes_and_functions_that_make_agents(template: Template) -> None:
    assert template.start("Outer.Inner").ask()["ok"] == "inner"
    assert template.start("make").ask()["ok"] == "made by a function"


@pytest.mark.parametrize(
    ("qualname", "kind", "message", "code"),
    [
        ("Unmade", "ValueError", "cannot be made", 1),
        ("Leaving", "SystemExit", "6", 6),
        ("Gone", "ostler.errors.AgentInitializationError", "Gone is not in", 1),
        ("make.<locals>.Hidden", "ostler.errors.AgentInitializationError", "has no name", 1),
        ("constant", "ostler.errors.AgentInitializationError", "neither a class nor", 1),
        ("Asked", "TypeError", "missing 1 required positional argument", 1),
    ],
)
def test_one_that_cannot_be_made_says_why_and_ends(
    template: Template, qualname: str, kind: str, message: str, code: int
) -> None:
    agent = template.start(qualname, begins=False)
    agent.begin(qualname)
    error = agent.hear("made")["error"]
    assert error["exception_type"] == kind
    assert message in error["message"]
    assert agent.wait() == code


def test_a_plan_that_is_none_is_told(template: Template) -> None:
    agent = template.start("Scripted", begins=False)
    agent.begin("Scripted", limits={"execution_timeout": "soon"})
    assert "no duration" in agent.hear("made")["error"]["message"]
    assert agent.wait() == 1


# --- answers -----------------------------------------------------------------------------------------


def test_what_it_raises_is_rendered(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    error = agent.ask({"do": "fail"})["error"]
    assert (error["message"], error["exception_type"]) == ("ValueError: as told", "ValueError")
    assert 'raise ValueError("as told")' in error["stack_trace"]
    assert "agent_process/host.py" not in error["stack_trace"]


@pytest.mark.parametrize(
    ("request_", "advice"),
    [
        ({"do": "set"}, "answer plain JSON data"),
        ({"do": "nan"}, "answer plain JSON data"),
        ({"do": "long", "length": framing.MAX_MESSAGE}, "write it to a file and answer the path"),
    ],
)
def test_what_cannot_be_sent_is_an_error_of_the_agent(
    template: Template, request_: dict[str, object], advice: str
) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    message = agent.ask(request_)["error"]["message"]
    assert message.startswith("what process answered cannot leave its process: ")
    assert message.endswith(f"; {advice}")
    assert agent.ask({"do": "echo", "value": 1})["ok"] == 1


def test_a_long_answer_arrives_whole(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    assert len(agent.ask({"do": "long", "length": 3_000_000})["ok"]) == 3_000_000


def test_a_cancelled_call_stops_first(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    number = agent.call({"do": "hang"})
    assert agent.next()["name"] == "began"
    agent.tell({"t": "cancel", "id": number})
    assert agent.next()["name"] == "stopped"
    assert agent.next() == {"t": "answer", "id": number, "cancelled": True}
    agent.tell({"t": "cancel", "id": number})  # too late, and no harm
    assert agent.ask({"do": "echo", "value": 1})["ok"] == 1


def test_a_plain_method_sees_that_it_is_cancelled(template: Template) -> None:
    agent = template.start("Plain")
    agent.ask(verb="initialize")
    number = agent.call()
    agent.hear("say")
    agent.tell({"t": "cancel", "id": number})
    assert agent.hear("answer") == {"t": "answer", "id": number, "cancelled": True}


def test_calls_overlap_and_workers_are_bounded(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    agent.call({"do": "hang"})
    agent.hear("say")
    assert agent.ask({"do": "threads"})["ok"] == 2


def test_the_same_call_twice_is_done_once(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    number = agent.call({"do": "echo", "value": 1})
    assert agent.hear("answer")["ok"] == 1
    again = {"t": "call", "id": number, "verb": "process", "payload": {"do": "echo", "value": 2}}
    agent.tell(again)
    assert agent.hear("answer") == {"t": "answer", "id": number, "ok": 1}
    # Once it is confirmed its name is free again; the acknowledgement may come with the very call.
    agent.tell(again | {"ack": [number], "seen": 0})
    assert agent.hear("answer") == {"t": "answer", "id": number, "ok": 2}


# --- speaking and asking -----------------------------------------------------------------------------


def test_what_is_said_is_heard_though_the_loop_is_blocked(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    agent.call({"do": "block"})
    assert agent.next() == {"t": "say", "kind": "signal", "name": "began", "payload": None, "number": 1}


def test_a_flood_drops_the_oldest_news_and_says_how_many(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    number = agent.call({"do": "flood", "count": 5000})
    # The agent is through with it before anybody reads; so most of it had to make room.
    until(lambda: _is_idle(agent.pid))
    said = []
    while (message := agent.next())["t"] == "say":
        said.append(message)
    assert message == {"t": "answer", "id": number, "ok": "said"}
    news = [one["fraction"] for one in said if one["kind"] == "progress"]
    assert news == sorted(news)
    assert news[-1] == 4999 / 5000
    assert [one["payload"]["number"] for one in said if one["kind"] == "signal"] == list(range(0, 5000, 100))
    assert said[-1]["dropped"] == 5000 - len(news) > 2000


def test_a_question_waits_for_its_answer(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    number = agent.call({"do": "wait"})
    question = agent.next()
    assert question == {
        "t": "ask",
        "id": 1,
        "kind": "human",
        "reason": "which?",
        "timeout_seconds": 9.0,
        "detail": None,
        "call": number,
    }
    agent.tell({"t": "reply", "id": 99, "outcome": "answered", "answer": None})
    agent.tell({"t": "reply", "id": 1, "outcome": "answered", "answer": {"colour": "red"}})
    assert agent.next()["ok"] == ["answered", {"colour": "red"}]
    agent.call({"do": "wait"})
    agent.tell({"t": "reply", "id": agent.hear("ask")["id"], "error": "a later start has taken over"})
    assert agent.next()["error"]["message"] == "AgentGoneError: a later start has taken over"


def test_a_question_from_another_loop_is_answered_there(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    number = agent.call({"do": "own_loop"})
    question = agent.next()
    assert question["call"] == number
    agent.tell({"t": "reply", "id": question["id"], "outcome": "answered", "answer": None})
    assert agent.next()["ok"] == ["answered", None]


def test_a_question_is_called_off_with_its_call(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    number = agent.call({"do": "wait"})
    question = agent.next()
    agent.tell({"t": "cancel", "id": number})
    assert agent.next() == {"t": "unask", "id": question["id"]}
    assert agent.next()["cancelled"] is True


# --- another manager ---------------------------------------------------------------------------------


def test_a_new_manager_gets_what_nobody_confirmed(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    confirmed = agent.ask({"do": "echo", "value": "confirmed"})
    held = agent.call({"do": "echo", "value": "held"})
    asking = agent.call({"do": "wait"})
    question = agent.hear("ask")
    agent.connect(EPOCH + 1)
    assert agent.next() == {"t": "answer", "id": held, "ok": "held"}
    assert agent.welcome == {
        "t": "welcome",
        "calls": [asking, held],
        "questions": [question["id"]],
        "made": {"t": "made"},
        "dropped": 0,
    }
    assert agent.next() == question
    agent.tell({"t": "ack", "ack": [held], "seen": 0})
    agent.tell({"t": "reply", "id": question["id"], "outcome": "answered", "answer": None})
    assert agent.next()["id"] == asking
    agent.connect(EPOCH + 2)
    assert agent.next() == {"t": "answer", "id": asking, "ok": ["answered", None]}
    assert agent.welcome["calls"] == [asking]
    agent.tell({"t": "ping", "n": 1})
    assert agent.next()["t"] == "pong", "what was confirmed does not come again"
    assert confirmed["ok"] == "confirmed"


@pytest.mark.parametrize(("epoch", "key"), [(EPOCH - 1, KEY), (EPOCH, "another key")])
def test_an_older_manager_or_one_without_the_key_is_not_obeyed(template: Template, epoch: int, key: str) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    present = agent.sock
    agent.connect(epoch, key)
    with contextlib.suppress(BrokenPipeError):
        agent.tell({"t": "stop"})
    with pytest.raises((EOFError, ConnectionResetError)):
        agent.next()
    agent.sock = present
    assert agent.ask({"do": "echo", "value": "here"})["ok"] == "here"


def test_a_manager_that_died_in_mid_read_leaves_nothing_half_heard(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    long = agent.call({"do": "long", "length": 2_000_000})
    until(lambda: _is_idle(agent.pid))
    flood = agent.call({"do": "flood", "count": 3000})
    until(lambda: _is_idle(agent.pid))
    agent.connect(EPOCH + 1)
    heard = [agent.next()]
    while sum(one["t"] == "answer" for one in heard) < 2:
        heard.append(agent.next())
    assert [(one["id"], len(one["ok"])) for one in heard if one["t"] == "answer"] == [(long, 2_000_000), (flood, 4)]
    numbers = [one["payload"]["number"] for one in heard if one["t"] == "say" and one["kind"] == "signal"]
    assert numbers == list(range(0, 3000, 100)), "what nobody could read yet is not lost"


def test_a_hello_before_the_beginning_is_answered(template: Template) -> None:
    agent = template.start("Scripted", begins=False)
    agent.begin("Scripted")
    assert agent.next() == {"t": "made"}
    assert agent.welcome["made"] is None


def test_nonsense_is_passed_over(template: Template) -> None:
    agent = template.start("Scripted")
    agent.ask(verb="initialize")
    agent.sock.send(b"no json\n[]\n" + b"[" * 600 + b"]" * 600 + b"\n")
    for message in (
        {"t": "sing"},
        {"t": "call"},
        {"t": "ack", "ack": 3},
        {"t": "reply"},
        {"t": "ping"},
        {"t": "begin"},
    ):
        agent.tell(message)
    assert agent.ask({"do": "echo", "value": 1})["ok"] == 1
    agent.tell({"t": "stop"})
    complaints = agent.output().splitlines()
    assert len(complaints) == 9
    assert all(line.startswith("ostler: what the manager sent makes no sense: ") for line in complaints)


def _is_idle(pid: int) -> bool:
    """Asleep, and without having used a processor for a while."""

    def ticks() -> tuple[str, str]:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[11] + fields[12]

    before = ticks()
    time.sleep(0.05)
    return before[0] == "S" and ticks() == before
