#!/usr/bin/env python3
"""Checks commit messages: an imperative subject of at most 72 characters, then an empty line.

`.ci/commit_message.py FILE` checks the message in a file, as a commit-msg hook receives it;
`.ci/commit_message.py A..B` checks the messages of a range of commits.
"""

import re
import subprocess
import sys
from pathlib import Path

MAX_SUBJECT = 72
GIT_SUBJECT = re.compile(r'(Merge|fixup!|squash!|amend!) |Revert "')
"""Subjects that git writes itself."""
NOT_IMPERATIVE = re.compile(
    r"(\w+ed|\w+ing|\w*[^s]s|\w+tion|A|An|The|This|That|Each|Every|One|Two|What|Who|Which|Where"
    r"|When|How|In|On|Of|At|For|From|With|Without|No|More|Fewer|Made|Wrote|Ran|Built|Took|Gave)"
)
IMPERATIVE = re.compile(
    r"Embed|Feed|Need|Seed|Speed|Proceed|Exceed|Shed|Bring|Ping|Focus|Bias"
    r"|Condition|Mention|Partition|Position"
)
"""Verbs that end as `NOT_IMPERATIVE` does."""


def faults(message: str) -> list[str]:
    """The rules that a commit message breaks, one line each."""
    body = re.split(r"^# -+ >8 -+$", message, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line.rstrip() for line in body.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if GIT_SUBJECT.match(subject):
        return []
    first = subject.split(" ")[0]
    broken = []
    if len(subject) > MAX_SUBJECT:
        broken.append(f"the subject has {len(subject)} characters; write at most {MAX_SUBJECT}")
    if not re.fullmatch(r"[A-Z][a-z]+(-[a-z]+)?", first) or (
        NOT_IMPERATIVE.fullmatch(first) and not IMPERATIVE.fullmatch(first)
    ):
        broken.append(f'"{first}" is no imperative; begin with a verb: "Add …", "Remove …"')
    if subject.endswith("."):
        broken.append("the subject ends with a full stop; leave it out")
    if len(lines) > 1 and lines[1]:
        broken.append("line 2 is not empty; separate the subject from the body")
    return broken


def messages(word: str) -> list[str]:
    if ".." not in word:
        return [Path(word).read_text(encoding="utf-8")]
    command = ["git", "log", "-z", "--format=%B", word]
    log = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
    return [message for message in log.split("\0") if message]


def main(word: str) -> int:
    status = 0
    for message in messages(word):
        for fault in faults(message):
            print(f"commit message {message.partition(chr(10))[0]!r}: {fault}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
