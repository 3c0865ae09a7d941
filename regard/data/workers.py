"""Work in other processes, its results in the order of the tasks.

A worker is a fresh interpreter that talks through its pipes. It knows nothing of the program that
started it, which needs no `if __name__ == "__main__"` therefore; and when that program ends, be it
killed, the pipe ends too, and the worker with it.
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import IO, Any, TypeVar, cast

State = TypeVar("State")
Task = TypeVar("Task")
Result = TypeVar("Result")


def spread(
    work: Callable[[State, Task], Result], state: State, tasks: Iterable[Task], workers: int
) -> Generator[Result, None, None]:
    """`work(state, task)` for every task, in order; each worker is given the state once.

    Each worker has one task at a time, and the next is fetched meanwhile, so that memory holds
    about two tasks for each. Without workers everything is done here.
    """
    if workers < 0:
        raise ValueError(f"workers ({workers}) must be 0 or more; 0 works in this process")
    if not workers:
        for task in tasks:
            yield work(state, task)
        return
    crew: deque[_Worker] = deque()
    try:
        for task in tasks:
            if len(crew) < workers:
                crew.append(_Worker(work, state))
                crew[-1].give(task)
                continue
            result = crew[0].take()
            crew.rotate(-1)
            crew[-1].give(task)
            yield cast(Result, result)
        # Those that were given a task and have not answered, from the earliest on.
        for worker in tuple(crew):
            yield cast(Result, worker.take())
    finally:
        for worker in crew:
            worker.end()


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    def __init__(self, work: Callable[..., object], state: object):
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        # One thread each: there are as many workers as processors.
        one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from regard.data.workers import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false", **one},
            # Ctrl-C is for the program; its worker ends with the pipe.
            start_new_session=True,
        )
        self.input = cast(IO[bytes], self.process.stdin)
        self.output = cast(IO[bytes], self.process.stdout)
        self.give((work, state))

    def give(self, task: object) -> None:
        try:
            pickle.dump(task, self.input, protocol=5)
            self.input.flush()
        except BrokenPipeError:
            raise self.ended() from None

    def take(self) -> object:
        try:
            result, error = pickle.load(self.output)
        except EOFError:
            raise self.ended() from None
        if error is not None:
            raise error
        return result

    def ended(self) -> ValueError:
        status = self.process.wait()
        return ValueError(
            f"a worker process ended (exit status {status}) before its work was done; "
            "memory may be short: try fewer workers, or 0 to see what happens"
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.output, self.input):
            with contextlib.suppress(BrokenPipeError):  # something it was never told
                pipe.close()


def serve() -> None:
    """A worker's life: what to do, and then task after task until the pipe ends."""
    tasks, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # Whatever a library prints goes to the terminal, not among the results.
    os.dup2(2, 1)
    work: Any = None
    try:
        work, state = pickle.load(tasks)
        while True:
            task = pickle.load(tasks)
            answer: tuple[object, Exception | None]
            try:
                answer = work(state, task), None
            except Exception as error:
                answer = None, error
            pickle.dump(answer, results, protocol=5)
            results.flush()
    except (EOFError, BrokenPipeError):
        pass
