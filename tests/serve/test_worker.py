"""A worker's side of its connection."""

import socket

import pytest

from regard.serve.worker import Line
from tests.processes import wait_until


def test_who_is_gone_without_having_listened_is_gone() -> None:
    ours, theirs = socket.socketpair()
    line = Line(ours, lambda: None)
    line.say({"ready": []})
    wait_until(lambda: theirs.recv(1, socket.MSG_PEEK) != b"")
    theirs.close()  # with something unread, which resets the connection
    with pytest.raises(EOFError):
        line.hear()
    line.end()
    ours.close()
