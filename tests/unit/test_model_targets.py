from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostler.model.spawn import HealthCheckConfig, HttpTarget, command_target, http_target, tcp_target
from ostler.model.states import ProbeType


def faults(probe: ProbeType, target: str | None) -> tuple[str, ...]:
    return HealthCheckConfig(probe=probe, target=target).validate().errors


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost", HttpTarget(host="localhost", port=80, tls=False, path="/", authority="localhost")),
        ("http://h:80/", HttpTarget(host="h", port=80, tls=False, path="/", authority="h")),
        ("https://h/a?b=c#d", HttpTarget(host="h", port=443, tls=True, path="/a?b=c", authority="h")),
        ("HTTP://H:8080?x", HttpTarget(host="h", port=8080, tls=False, path="/?x", authority="h:8080")),
        ("http://[::1]:81/x", HttpTarget(host="::1", port=81, tls=False, path="/x", authority="[::1]:81")),
    ],
)
def test_a_url_is_taken_apart(url: str, expected: HttpTarget) -> None:
    assert http_target(url) == expected
    assert not faults(ProbeType.HTTP, url)


@pytest.mark.parametrize(
    ("url", "bound"),
    [
        ("localhost:80", "begins with http"),
        ("ftp://localhost/", "begins with http"),
        ("file:///etc/passwd", "begins with http"),
        ("http://", "begins with http"),
        ("http:///health", "begins with http"),
        ("http://h:0/", "a port from 1 to 65535"),
        ("http://h:65536/", "a port from 1 to 65535"),
        ("http://h:x/", "a port from 1 to 65535"),
        ("http://[::1/", "a port from 1 to 65535"),
        ("http://me:secret@h/", "user name or password"),
        ("http://h/a b", "without spaces"),
        ("http://h/\r\nX-Evil: 1", "without spaces"),
        ("http://h/\tx", "without spaces"),
        ("http://bücher.example/", "ASCII"),
    ],
)
def test_a_bad_url_is_refused_early(url: str, bound: str) -> None:
    (error,) = faults(ProbeType.HTTP, url)
    assert error.startswith("target must")
    assert bound in error


@pytest.mark.parametrize(
    ("text", "expected"),
    [("localhost:80", ("localhost", 80)), ("[::1]:65535", ("::1", 65535)), ("10.0.0.1:1", ("10.0.0.1", 1))],
)
def test_host_and_port_are_taken_apart(text: str, expected: tuple[str, int]) -> None:
    assert tcp_target(text) == expected
    assert not faults(ProbeType.TCP, text)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("localhost", "host:port"),
        (":80", "host:port"),
        ("[]:80", "host:port"),
        ("a b:80", "host:port"),
        ("http://h:80", "into brackets"),
        ("h:", "a port from 1"),
        ("h:0", "a port from 1"),
        ("h:65536", "a port from 1"),
        ("h:+1", "a port from 1"),
        ("h:٣", "a port from 1"),
        ("h:" + "0" * 500, "a port from 1"),
        ("::1:80", "into brackets"),
    ],
)
def test_a_bad_address_is_refused_early(text: str, bound: str) -> None:
    (error,) = faults(ProbeType.TCP, text)
    assert bound in error


def test_a_command_line_is_split_as_a_shell_would() -> None:
    assert command_target("check --name 'two words' \"$HOME\"") == ("check", "--name", "two words", "$HOME")


@pytest.mark.parametrize(
    ("text", "bound"),
    [("'open", "no closing quotation"), ("  \n", "must name a program"), ("''", "must name a program")],
)
def test_a_bad_command_line_is_refused_early(text: str, bound: str) -> None:
    (error,) = faults(ProbeType.COMMAND, text)
    assert bound in error


@pytest.mark.parametrize("probe", [ProbeType.HTTP, ProbeType.TCP, ProbeType.COMMAND])
@pytest.mark.parametrize("target", [None, ""])
def test_a_probe_from_outside_needs_a_target(probe: ProbeType, target: str | None) -> None:
    assert faults(probe, target) == (f"target is required for a {probe} probe",)


def test_other_probes_need_none_and_what_cannot_be_kept_is_said_once() -> None:
    assert not faults(ProbeType.HEARTBEAT, None)
    assert not faults(ProbeType.CUSTOM, "whatever: it likes")
    assert faults(ProbeType.COMMAND, "a\0b") == ("target must not contain NUL",)
    assert HealthCheckConfig(probe=ProbeType.TCP, target=7).validate().errors  # type: ignore[arg-type]  # wrong on purpose


@given(st.sampled_from([http_target, tcp_target, command_target]), st.text(st.characters(), max_size=60))
def test_any_text_is_taken_apart_or_refused(taken_apart: Callable[[str], object], text: str) -> None:
    try:
        taken_apart(text)
    except ValueError as error:
        told = str(error)
    else:
        told = "must not be told"
    assert told.startswith("must ")


@given(st.text(st.characters(), max_size=40))
def test_nothing_gets_from_a_url_into_the_request_but_what_belongs_there(text: str) -> None:
    try:
        target = http_target(f"http://h/{text}")
    except ValueError:
        return
    line = f"{target.path} {target.authority}"
    assert line.isascii()
    assert line.isprintable()
    assert line.count(" ") == 1
