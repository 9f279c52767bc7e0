"""What one run of a command is given, and what its end means; nothing is started here."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from ostler.agents import AgentContext, CommandSpec, ExitMeaning, Message, PromptBy, WaitAnswer, WaitAsked
from ostler.agents.command import (
    CommandMaker,
    Ending,
    KeptOutput,
    Place,
    answer_of,
    environment,
    place_of,
    prompt_file_of,
    prompt_of,
    require_runnable,
    start_of,
)
from ostler.errors import AgentExecutionError, InvalidOperationError, ValidationError
from ostler.model.context import ContextData
from ostler.model.spawn import ResourceLimits
from ostler.testing.clock import ManualClock

ID = UUID("01234567-89ab-7def-8123-456789abcdef")


class Mute:
    def say(self, message: Message) -> None: ...

    async def ask(self, wait: WaitAsked) -> WaitAnswer:
        return WaitAnswer(outcome=wait.kind)


def context(workdir: Path | None = None, data: dict[str, Any] | None = None, **more: Any) -> AgentContext:
    return AgentContext(
        instance_id=ID, attempt=4, definition_id=UUID(int=2), name="fixer", data=ContextData(data or {}),
        limits=ResourceLimits(max_worker_threads=6), clock=ManualClock(), voice=Mute(), directory=workdir, **more,
    )  # fmt: skip


def spec(*argv: str, **fields: Any) -> CommandSpec:
    return CommandSpec(argv=argv, **fields)


def said(text: bytes, limit: int = 4096) -> KeptOutput:
    output = KeptOutput(limit)
    output.feed(text)
    return output


# --- the prompt and the place ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "instructions", "prompt"),
    [
        ("Fix it.", None, "Fix it."),
        ({"prompt": "Fix it.", "more": 1}, "Be brief.", "Be brief.\n\nFix it."),
        (None, "Be brief.", "Be brief."),
        ({}, "Be brief.", "Be brief."),
        ("", None, ""),
    ],
)
def test_a_request_is_a_prompt(request_: Any, instructions: str | None, prompt: str) -> None:
    assert prompt_of(request_, instructions) == prompt


@pytest.mark.parametrize("request_", [None, 3, {}, {"prompt": 3}, ["x"], "a\0b"])
def test_a_request_without_a_prompt_is_refused(request_: Any) -> None:
    with pytest.raises(ValidationError, match=r"(request must be a text|prompt must not)"):
        prompt_of(request_, None)


def test_a_prompt_file_is_private_made_anew_and_removed(tmp_path: Path) -> None:
    work, other = tmp_path / "work", tmp_path / "other"
    other.write_text("not to be touched")
    work.mkdir()
    prompt_file_of(work, "key").symlink_to(other)
    place = place_of(spec("cat"), context(work), "Fix the tést.\r\n", "key")
    assert place == Place(cwd=work, workdir=work, prompt_file=prompt_file_of(work, "key"))
    file = prompt_file_of(work, "key")
    assert file.read_bytes() == "Fix the tést.\r\n".encode()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    place.remove()
    place.remove()
    assert list(work.iterdir()) == []
    assert other.read_text() == "not to be touched"


def test_no_file_is_written_where_none_is_read(tmp_path: Path) -> None:
    place = place_of(spec("cat", prompt_by=PromptBy.STDIN), context(tmp_path / "work"), "x", "key")
    assert place.prompt_file is None
    assert list((tmp_path / "work").iterdir()) == []
    assert place_of(spec("cat", "{prompt_file}", prompt_by=PromptBy.STDIN), context(tmp_path), "x", "k").prompt_file


def test_the_private_workdir_is_made_and_a_given_one_is_not(tmp_path: Path) -> None:
    assert place_of(spec("cat"), context(tmp_path / "own"), "x", "key").cwd == tmp_path / "own"
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700
    with pytest.raises(FileNotFoundError):
        place_of(spec("cat"), context(tmp_path / "given", owns_directory=False), "x", "key")
    assert not (tmp_path / "given").exists()


def test_without_a_workdir_it_runs_in_a_place_that_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = place_of(spec("cat"), context(), "x", "key")
    assert place.cwd.parent == tmp_path
    (place.cwd / "left").touch()
    place.remove()
    assert list(tmp_path.iterdir()) == []


def test_placeholders_say_who_and_where(tmp_path: Path) -> None:
    words = ("run", "{instance_id}", "{attempt}", "{name}", "{workdir}", "{context.depth}", "{{}}")
    place = Place(cwd=tmp_path, workdir=tmp_path)
    start = start_of(spec(*words), context(tmp_path, {"Depth": 3}), place, "x")
    assert start.argv == ("run", str(ID), "4", "fixer", str(tmp_path), "3", "{}")
    assert (start.cwd, start.stdin, start.pty) == (tmp_path, None, False)


def test_a_prompt_goes_as_an_argument_or_on_standard_input(tmp_path: Path) -> None:
    place = Place(cwd=tmp_path, workdir=tmp_path)
    by_argument = {"prompt_by": PromptBy.ARGUMENT}
    odd = "$(id) `id` ; {name}"
    assert start_of(spec("run", "a {prompt} b", **by_argument), context(), place, odd).argv == ("run", f"a {odd} b")
    assert start_of(spec("run", **by_argument), context(), place, "-n").argv == ("run", "-n")
    with pytest.raises(ValidationError, match="argument must be shorter than 128 KiB; pass a long prompt by file"):
        start_of(spec("run", **by_argument), context(), place, "x" * 200_000)
    assert start_of(spec("run", prompt_by=PromptBy.STDIN), context(), place, "tést").stdin == "tést".encode()


# --- the walls ---------------------------------------------------------------------------------------


def test_it_sees_only_the_variables_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    monkeypatch.setenv("API_KEY", "k-1")
    monkeypatch.setenv("HOME", "/home/ada")
    asked = spec("env", env=("API_KEY", "NOT_SET"), set_env={"MODE": "fast", "TONE": "calm"})
    plain = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": "/home/ada",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "API_KEY": "k-1",
        "MODE": "fast",
        "TONE": "calm",
        "OSTLER_INSTANCE": str(ID),
        "OSTLER_ATTEMPT": "4",
        "OSTLER_MAX_WORKER_THREADS": "6",
    }
    assert environment(asked, context()) == plain
    spawned = {"API_KEY": "k-2", "MODE": "slow", "MORE": "yes", "OSTLER_ATTEMPT": "9"}
    place = Place(cwd=Path("/w"), workdir=Path("/w"), prompt_file=Path("/p"))
    ours = {"OSTLER_PROMPT_FILE": "/p", "OSTLER_WORKDIR": "/w"}
    wanted = {**plain, "API_KEY": "k-2", "MODE": "slow", "MORE": "yes", **ours}
    assert environment(asked, context(env=spawned), place) == wanted, "only Ostler says who it is"
    assert environment(spec("env", pty=True), context())["TERM"] == "xterm-256color"


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("no-such-program-here",), r"no program 'no-such-.* on the agent's PATH \(/usr/local/bin:/usr/bin:/bin\)"),
        (("/etc/passwd",), "there is no program '/etc/passwd'"),
        (("echo", "{context.repo}"), "{context.repo} is used by the command"),
        (("echo", "{nothing}"), "argv.1 must use only"),
    ],
)
def test_what_can_never_run_is_refused(argv: tuple[str, ...], complaint: str) -> None:
    with pytest.raises((AgentExecutionError, ValidationError), match=complaint):
        require_runnable(spec(*argv), context())


def test_a_program_may_be_found_by_the_path_of_the_spawn(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("#!/bin/sh\n")
    (tmp_path / "mine").chmod(0o755)
    with pytest.raises(AgentExecutionError, match="there is no program"):
        require_runnable(spec("mine"), context())
    require_runnable(spec("mine"), context(env={"PATH": str(tmp_path)}))
    require_runnable(spec("./not/there/yet"), context())
    require_runnable(spec("./mine", cwd=str(tmp_path)), context())
    with pytest.raises(AgentExecutionError, match=rf"there is no program '\./yours' in {tmp_path}"):
        require_runnable(spec("./yours", cwd=str(tmp_path)), context())


# --- how it ends -------------------------------------------------------------------------------------


def test_exit_codes_mean_what_the_spec_says() -> None:
    codes = {3: ExitMeaning.RETRY, 4: ExitMeaning.BLOCKED, 5: ExitMeaning.DONE}
    for code, meaning in ((0, "done"), (3, "retry"), (4, "blocked"), (5, "done")):
        answer = answer_of(spec("run", exit_codes=codes).checked(), Ending(code=code), said(b"so"), 1.5, 7)
        assert answer == {
            "exit_code": code,
            "meaning": meaning,
            "output": "so",
            "dropped_bytes": 7,
            "duration_seconds": 1.5,
        }


def test_a_failure_shows_its_code_and_its_last_lines() -> None:
    lines = b"".join(b"line %d\n" % number for number in range(100)) + b"broken\n"
    with pytest.raises(AgentExecutionError) as caught:
        answer_of(spec("sh"), Ending(code=7), said(lines), 1.0)
    assert str(caught.value).splitlines()[0] == "sh failed with exit code 7; its last lines:"
    assert str(caught.value).splitlines()[1:] == [*(f"line {number}" for number in range(81, 100)), "broken"]
    assert (caught.value.exit_code, caught.value.signal) == (7, None)
    with pytest.raises(AgentExecutionError, match=r"^false failed with exit code 1 and said nothing$"):
        answer_of(spec("false"), Ending(code=1), said(b""), 1.0)


def test_a_signal_and_an_unknown_end_are_failures() -> None:
    with pytest.raises(AgentExecutionError, match=r"run was killed by SIGKILL; its last lines:\nlast$") as caught:
        answer_of(spec("run"), Ending(signal_name="SIGKILL"), said(b"last\n"), 1.0)
    assert (caught.value.exit_code, caught.value.signal) == (None, "SIGKILL")
    with pytest.raises(AgentExecutionError, match="its exit code is not known"):
        answer_of(spec("run"), Ending(), said(b""), 1.0)


def test_much_output_is_bounded_and_counted() -> None:
    output = said(b"a" * 3000 + b"z" * 3000, 2048)
    answer = answer_of(spec("run"), Ending(code=0), output, 1.0, 10)
    assert answer["output"].startswith("a" * 1024)
    assert answer["output"].endswith("z" * 1024)
    assert "… (3952 bytes left out) …" in answer["output"]
    assert answer["dropped_bytes"] == 3952 + 10


def test_a_command_has_no_object() -> None:
    with pytest.raises(InvalidOperationError, match="the command echo runs only at isolation level process"):
        CommandMaker("echo")()
