"""Work elsewhere: in worker processes, or ahead of time in a thread.

    spread(work, state, tasks, workers)       processes; results in the order of the tasks
    completed(work, state, tasks, workers)    processes; results as they come, errors among them
    prefetch(make, items)                     a thread; results in order
    interruptible(work, items)                a thread, while this one hears Ctrl-C

A worker process is a fresh interpreter that talks through its pipes. It does not import the main
program, which therefore needs no `if __name__ == "__main__"`. When that program ends, even killed,
the pipe closes, and the worker ends with it.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import IO, Any, TypeVar, cast

State = TypeVar("State")
Task = TypeVar("Task")
Result = TypeVar("Result")

LISTEN, GRACE = 0.1, 0.2
"""Seconds between looks for Ctrl-C; seconds that interrupted work has to end by itself."""


def spread(
    work: Callable[[State, Task], Result], state: State, tasks: Iterable[Task], workers: int
) -> Generator[Result, None, None]:
    """`work(state, task)` for every task, in order; each worker receives the state once.

    A worker has one task at a time, and the next is read meanwhile, so that memory holds about two
    tasks for each. With 0 workers everything is done in this process.
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
        # The tasks still being worked on, oldest first.
        for worker in tuple(crew):
            yield cast(Result, worker.take())
    finally:
        for worker in crew:
            worker.end()


def completed(
    work: Callable[[State, Task], Result], state: State, tasks: Iterable[Task], workers: int
) -> Generator[tuple[Task, Result | Exception], None, None]:
    """Each task with `work(state, task)`, or with the error it raised, as soon as it is done.

    A worker that dies is an error of its task alone; the other tasks go on in another worker.
    """
    waiting, done = deque(tasks), SimpleQueue[tuple[Task, Result | Exception]]()
    crew: set[_Worker] = set()
    changing = threading.Lock()

    def drive() -> None:
        """One worker's tasks, and a new worker where it dies."""
        worker: _Worker | None = None
        while True:
            with changing:
                if not waiting:
                    return
                task = waiting.popleft()
                try:
                    if worker is None:
                        crew.add(worker := _Worker(work, state))
                except ValueError as error:
                    done.put((task, error))
                    continue
            try:
                worker.give(task)
                done.put((task, cast(Result, worker.take())))
            except Exception as error:
                done.put((task, error))
                if worker.process.poll() is not None:
                    worker = None

    left = len(waiting)
    threads = [threading.Thread(target=drive) for _ in range(min(workers, left))]
    try:
        for thread in threads:
            thread.start()
        for _ in range(left):
            yield done.get()
    finally:
        with changing:
            waiting.clear()
            for worker in crew:
                worker.process.kill()
        for thread in threads:
            thread.join()
        for worker in crew:
            worker.end()


def prefetch(
    make: Callable[[Task], Result], items: Iterable[Task], *, ahead: int = 2
) -> Iterator[Result]:
    """`make(item)` for every item, in order, up to `ahead` of them made in a thread beforehand.

    An exception in `make` is raised where its result would have come.
    """
    if ahead < 0:
        raise ValueError(f"ahead ({ahead}) must be 0 or more; 0 makes each when it is wanted")
    if not ahead:
        yield from map(make, items)
        return
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # The consumer has failed, or wants no more.
        pool.shutdown(cancel_futures=True)


def interruptible(work: Callable[[Iterator[Task]], Result], items: Iterable[Task]) -> Result:
    """`work(items)` in a thread, since a library that is at work in this one would not hear Ctrl-C.

    Interrupted, the work gets no more items; where it wants none, it goes on in its thread until it
    is done, or the process ends.
    """
    done, given_up = Future[Result](), threading.Event()

    def fed() -> Iterator[Task]:
        for item in items:
            if given_up.is_set():
                raise InterruptedError
            yield item

    def run() -> None:
        try:
            done.set_result(work(fed()))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="interruptible", daemon=True)
    try:
        thread.start()
        while not done.done():
            wait([done], LISTEN)  # by itself it would not hear signals on every system
        return done.result()
    finally:
        given_up.set()
        if thread.is_alive():
            thread.join(GRACE)


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
            with contextlib.suppress(BrokenPipeError):  # unsent data
                pipe.close()


def serve() -> None:
    """A worker's main loop: the work and its state first, then tasks until the pipe closes."""
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
