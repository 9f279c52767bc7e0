"""A program that an agent runs: it makes the calls that it is told to make, and writes down what it was answered."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ostler.client.blocking import BlockingClient, DaemonError

home, place = Path(sys.argv[1]), Path(sys.argv[2])
answers = []
for verb, parameters in json.loads((place / "calls.json").read_text()):
    try:
        answers.append({"ok": BlockingClient(home).call(verb, **parameters)})
    except DaemonError as error:
        answers.append({"code": error.code, "detail": str(error)})
(place / "answers.part").write_text(json.dumps(answers))
(place / "answers.part").rename(place / "answers.json")
