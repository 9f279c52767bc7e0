from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostler.agents import CommandSpec, ExitMeaning, PromptBy
from ostler.agents.command import KeptOutput
from ostler.agents.commandspec import PLACEHOLDERS
from ostler.errors import ValidationError
from ostler.model.context import ContextData

VALUES = {name: f"<{name}>" for name in PLACEHOLDERS}


def spec(*argv: str, **fields: Any) -> CommandSpec:
    return CommandSpec(argv=argv or ("true",), **fields)


# --- the template ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "filled"),
    [
        ("plain", "plain"),
        ("{prompt}", "<prompt>"),
        ("--file={prompt_file}!", "--file=<prompt_file>!"),
        ("{workdir}/{name}-{attempt}-{instance_id}", "<workdir>/<name>-<attempt>-<instance_id>"),
        ('{{"a": 1}}', '{"a": 1}'),
        ("{{prompt}}", "{prompt}"),
        ("{context.depth}", "deep"),
        ("{context.DEPTH}", "deep"),
        ("{context.target-repo}", "/srv"),
        ("{context.count}/{context.dry}", "3/true"),
        ("$HOME; rm -rf *", "$HOME; rm -rf *"),
    ],
)
def test_placeholders_are_filled(argument: str, filled: str) -> None:
    context = ContextData({"Depth": "deep", "target-repo": "/srv", "count": 3, "dry": True})
    it = spec("run", argument)
    assert it.validate()
    assert it.fill(VALUES, context) == ("run", filled)


def test_what_is_filled_in_is_not_read_as_a_template() -> None:
    values = VALUES | {"prompt": "{workdir} {{ {nothing}"}
    assert spec("run", "{prompt}").fill(values, {}) == ("run", "{workdir} {{ {nothing}")


@given(st.text())
def test_any_prompt_arrives_as_it_is(prompt: str) -> None:
    assert spec("run", "a {prompt} b").fill({"prompt": prompt}, {}) == ("run", f"a {prompt} b")


@settings(deadline=None)  # the first check loads the validation library
@given(st.lists(st.sampled_from(["{", "}", "context.", "prompt", "a", ".", "!", ":", "["])).map("".join))
def test_a_template_is_either_refused_or_filled(argument: str) -> None:
    it = spec("run", argument)
    if it.validate():
        keys = re.findall(r"\{context\.([^{}]+)\}", argument)
        it.fill(VALUES, dict.fromkeys(keys, "1"))


@pytest.mark.parametrize("argument", ["{", "}", "{prompt", "a}b", "{a{b}}", "{prompt!x!}", "{context.!{}"])
def test_single_braces_are_a_fault(argument: str) -> None:
    assert any("argv.1 must" in one for one in spec("run", argument).validate().errors)


@pytest.mark.parametrize("name", ["", "0", "promt", "prompt!r", "prompt:>9", "context", "context.", "prompt.x"])
def test_an_unknown_placeholder_is_a_fault(name: str) -> None:
    [error] = spec("run", f"{{{name}}}").validate().errors
    assert error.startswith("argv.1 must use only {attempt}, {instance_id}")


def test_a_context_key_that_is_missing_or_no_word_is_told() -> None:
    it = spec("run", "{context.repo}", "{context.list}")
    with pytest.raises(ValidationError) as caught:
        it.fill(VALUES, ContextData({"list": [1]}))
    assert [fault.message for fault in caught.value.faults] == [
        "{context.repo} is used by the command, but the spawn gave no such context",
        "{context.list} must be text, a number or a truth value, was [1]",
    ]


# --- the rest of it ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"argv": ()}, "argv must begin with a program"),
        ({"argv": ("",)}, "argv must begin with a program"),
        ({"argv": ("a\0b",)}, "argv.0 must not contain NUL"),
        ({"argv": "ls -l"}, "argv must be a list"),
        ({"env": ("A=B",)}, "env must name variables by letters"),
        ({"env": ("OSTLER_ATTEMPT",)}, "env must not name variables that begin with OSTLER_"),
        ({"set_env": {"OSTLER_INSTANCE": "x"}}, "set_env must not name variables that begin with OSTLER_"),
        ({"set_env": {"": "x"}}, "set_env must name variables"),
        ({"set_env": {"A": "\0"}}, "must not contain NUL"),
        ({"set_env": {"A": 1}}, "set_env.A must be text"),
        ({"exit_codes": {"256": ExitMeaning.DONE}}, "exit_codes must have exit codes of 0 to 255"),
        ({"exit_codes": {"01": ExitMeaning.DONE}}, "exit_codes must have exit codes"),
        ({"exit_codes": {"1": "fine"}}, "exit_codes.1 must be one of done, failed, retry, blocked"),
        ({"cwd": "src"}, "cwd must be workdir or an absolute path"),
        ({"max_output_bytes": 10}, "max_output_bytes must be 1024 to 67108864"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], fault: str) -> None:
    errors = CommandSpec(**{"argv": ("true",), **fields}).validate().errors
    assert any(fault in one for one in errors), errors


def test_lists_are_taken_and_json_comes_back_the_same() -> None:
    argv: Any = ["aider", "--message-file", "{prompt_file}"]
    it = CommandSpec(
        argv=argv, env=("API_KEY",), set_env={"A": "1"}, prompt_by=PromptBy.STDIN, pty=True, cwd="/srv",
        exit_codes={"3": ExitMeaning.RETRY},
    ).checked()  # fmt: skip
    assert it.argv == tuple(argv)
    assert it.validate()
    assert CommandSpec.from_json(it.to_json()) == it


def test_exit_codes_may_be_numbers() -> None:
    it = spec(exit_codes={3: ExitMeaning.RETRY}).checked()
    assert it.meaning(3) is ExitMeaning.RETRY
    assert CommandSpec.from_json(it.to_json()) == it
    for wrong in (256, -1, True, 1.5):
        assert not spec(exit_codes={wrong: ExitMeaning.DONE}).validate().is_valid


def test_exit_codes_mean_done_failed_or_what_was_said() -> None:
    it = spec(exit_codes={"3": ExitMeaning.RETRY, "0": ExitMeaning.BLOCKED})
    assert [it.meaning(code).value for code in (0, 1, 3)] == ["blocked", "failed", "retry"]
    assert [spec().meaning(code).value for code in (0, 1, 3)] == ["done", "failed", "failed"]


def test_which_placeholders_are_used() -> None:
    assert spec("run", "x{prompt_file}").uses("prompt_file")
    assert not spec("run", "{{prompt}}").uses("prompt")


# --- the output that is kept -------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40)), st.integers(2, 60))
def test_the_beginning_and_the_end_are_kept_and_the_rest_is_counted(chunks: list[bytes], limit: int) -> None:
    kept, whole = KeptOutput(limit), b"".join(chunks)
    for chunk in chunks:
        kept.feed(chunk)
    half = limit // 2
    dropped = max(len(whole) - 2 * half, 0)
    assert kept.dropped == dropped
    text = kept.text()
    assert kept.dropped == dropped
    if dropped:
        whole_text = [part.decode("utf-8", "replace").replace("\0", "\ufffd") for part in (whole[:half], whole[-half:])]
        assert text == f"\n… ({dropped} bytes left out) …\n".join(whole_text)
    else:
        assert text == whole.decode("utf-8", "replace").replace("\0", "\ufffd")


def test_the_last_lines() -> None:
    kept = KeptOutput(100)
    kept.feed(b"one\ntwo\nthree\n\n")
    assert kept.last_lines(2, 1000) == "two\nthree"
    assert kept.last_lines(9, 7) == "three"
    assert not KeptOutput(100).last_lines(5, 5)
