"""`regard lab --find WORD …`: experiments, questions and exercises by what they are about.

Everything here is read without running, or importing, an experiment.
"""

import sys
from collections.abc import Iterator, Sequence

from regard.lab.answers import section_word
from regard.lab.claims import lines
from regard.lab.claims.stated import STATED
from regard.lab.exercise import EXERCISES
from regard.lab.place import SECTIONS, TITLES
from regard.machine.command_line import matching
from regard.machine.shell import program, typed


def find(words: Sequence[str]) -> int:
    """Prints what has all the words, with the command that shows it; 1 where nothing has."""
    shown = matching(((typed(command), text) for command, text in rows()), words)
    if shown:
        print("\n".join(shown))
        return 0
    print(
        f"regard: nothing in the lab has to do with {' '.join(words)!r}; {program()} lab lists all "
        f"experiments, {program()} lab answers all questions",
        file=sys.stderr,
    )
    return 1


def rows() -> Iterator[tuple[str, str]]:
    """Commands, and what they are about."""
    for family, some in lines().items():
        for line in some:
            yield f"regard lab {line.name}", f"{line.taught} ({line.place}; {family.title})"
    for entry in STATED:
        yield f"regard lab {entry.item}", f"{entry.words} ({entry.place}; stated: {entry.verdict})"
    for document, sections in SECTIONS.items():
        for section, about in sections.items():
            place = section_word(section)
            yield (
                f"regard lab answers {document} {place}",
                f"{about} ({TITLES[document]} {section})",
            )
    for name, about in EXERCISES.items():
        yield f"regard lab exercise {name}", about
