"""Ray with one actor that answers what it is asked. For each number on its input it asks so often, one at a time, and
prints the milliseconds of each call as a JSON list. Its files go into the directory that is its argument. Runs without
Ostler.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray


class Echo:
    def process(self, request: Any) -> Any:
        return request


def main(folder: str) -> None:
    ray.init(_temp_dir=folder, num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    actor_class: Any = ray.remote(num_cpus=0)(Echo)
    actor = actor_class.remote()
    ray.get(actor.process.remote(0))
    print("ready", flush=True)
    for line in sys.stdin:
        took = []
        for number in range(int(line)):
            began = time.perf_counter()
            ray.get(actor.process.remote(number))
            took.append((time.perf_counter() - began) * 1000)
        print(json.dumps(took), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
