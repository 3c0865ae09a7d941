"""`regard studio`: serves the pages on loopback, and opens the browser."""

import contextlib
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from regard.machine.command_line import Parser

PORT = 8421

PAUSE = 1.5
"""Seconds until torch is imported: the first page is drawn by then, with the core to itself."""


def studio(words: Sequence[str]) -> int:
    parser = Parser(
        prog="regard studio",
        description="Opens pages in the browser: attention by hand, its geometry, positions, masks "
        "and costs, the course, and the inside of trained models. With no run named, those in "
        "runs/ are offered; the other pages need none. It serves this machine alone, and fetches "
        "nothing.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="runs, or models' folders")
    parser.add_argument(
        "--port", type=int, help=f"the port; by default {PORT}, or a free one where that is taken"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="the address to serve; by default this machine alone"
    )
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    options = parser.parse_args(list(words))
    if options.port is not None and not 0 <= options.port < 2**16:
        raise ValueError(f"port ({options.port}) must be from 0 to {2**16 - 1}")

    from regard.studio.ask import questions, warm_up
    from regard.studio.runs import Runs
    from regard.studio.server import Server

    runs = Runs([Path(run) for run in options.runs])
    asks = questions(runs)

    def serving(port: int) -> Server:
        try:
            return Server(options.host, port, asks)
        except OSError as error:
            raise ValueError(
                f"cannot serve {options.host}, port {port}: {error.strerror}; try another --port"
            ) from None

    if options.port is not None:
        server = serving(options.port)
    else:
        try:
            server = serving(PORT)
        except ValueError:
            server = serving(0)
    print(f"The studio is at {server.address} (Ctrl-C ends it)", flush=True)
    if not options.no_browser:
        threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
    warming = threading.Timer(PAUSE, warm_up, (runs,))
    warming.daemon = True
    warming.start()
    with contextlib.suppress(KeyboardInterrupt), server:
        server.serve_forever()
    print()
    return 0
