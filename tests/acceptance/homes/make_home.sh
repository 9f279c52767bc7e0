#!/bin/sh
# Makes the archive of a home that test_old_home.py opens. Run with the program of the version that the home is to be of:
#
#     git worktree add /tmp/ostler-a1a14d9 a1a14d9 && sh /tmp/ostler-a1a14d9/scripts/bootstrap /tmp/ostler-a1a14d9/.venv
#     sh tests/acceptance/homes/make_home.sh /tmp/ostler-a1a14d9/.venv/bin/ostler tests/acceptance/homes/a1a14d9.tar.xz
#
# It holds a project with its home as `kill -9` of everything leaves them: agents that ended, failed and ran, a task in
# each state, one of them in the vault, and a run of a population that stands at turn 3 of 6.
set -eu
program=$1 archive=$PWD/$2 folder=/tmp/ostler-fixture
rm -rf "$folder"
mkdir -p "$folder/user" "$folder/project"
cd "$folder/project"
ostler() { env -i HOME="$folder/user" PATH=/usr/bin:/bin LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 "$program" "$@"; }
repository() { env -i HOME="$folder/user" PATH=/usr/bin:/bin git -c user.name=Ada -c user.email=ada@example.org "$@"; }
until_task() { until ostler task show "$1" | grep -q "$2"; do sleep 0.1; done; }

repository init --quiet --template= --initial-branch=main
printf '.ostler/\n' > .gitignore
printf 'one\ntwo\n' > list.txt
cat > ostler.toml <<'END'
[crew.night]
agent = "crewed"
count = 1
on-error = "restart"
backoff = "0s"
END
cat > small.toml <<'END'
name = "small"
turns = 6
seed = 3
engine = "small:Engine"
[parameters]
most = 9
[brains]
saver = "small:Saver"
[[agents]]
name = "saver"
kind = "saver"
count = 3
state = { coins = 5 }
END
cat > small.py <<'END'
class Saver:
    def decide(self, view):
        return view.random.randint(0, view.parameters["most"])


class Engine:
    def update(self, state, decisions, world):
        for member, amount in decisions.pairs():
            member.state["coins"] += amount
END
repository add --all
repository commit --quiet --message=first
mkdir -p .ostler/agents
for name in worker crewed; do
    cat > .ostler/agents/$name.md <<'END'
---
description: Does what the task says
lifecycle:
  driver: {command: [sh, -ec, "eval \"$(sed '/^$/,$d' {prompt_file})\""]}
---
END
done

ostler run --name ended -- sh -c 'echo done'
ostler run --name failed -- sh -c 'echo broken >&2; exit 3' || true
ostler run -d --name running -- sh -c 'echo at work; exec tail -f /dev/null'

for key in accepted rejected retired completed; do
    ostler task add "echo $key > $key.txt" --agent worker --key $key --check "grep -q $key $key.txt"
    until_task $key '"state": "completed"'
done
ostler accept accepted
ostler reject rejected -m "not wanted"
ostler accept retired
ostler retire retired
ostler task add "exit 3" --agent crewed --key parked
ostler crew up -d
until ostler waits | grep -q parked; do sleep 0.1; done
ostler crew stop night
ostler task add "echo later" --agent worker --key queued --hold
ostler task add "echo begun > begun.txt; exec tail -f /dev/null" --agent worker --key running
until [ -e .ostler/tasks/running/begun.txt ]; do sleep 0.1; done

ostler sim run small.toml --turns 3 --quiet
sync
for file in $(grep -l --text -e "HOME=$folder/user" -e "$folder/project/.ostler/keeper" /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null); do
    process=${file#/proc/}
    process=${process%/*}
    case $(readlink "/proc/$process/exe") in *python*|*tail) kill -9 "$process" ;; esac
done
find . -type s -delete
tar --create --xz --owner=0 --group=0 --file="$archive" -C "$folder" project
rm -rf "$folder"
