"""Continuous batching: sentences join a running batch within `STEPS` steps, and leave when done.

    waiting ─▶ open a session, first step ─▶ join ─▶ step, step, step, … ─▶ leave with the result

One step of the model computes the rows of all requests, whatever their search: the sentences of one
kind of search form a `Lane`. An engine that captures whole searches, as on CUDA, is not stepped
from here: sentences that wait together form one session, and sessions take turns.

Results do not depend on the rest of the batch: see `tests/service`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from regard.decode.engine.session import Integers, Rolling, Session
from regard.decode.search.beam import Beams, power
from regard.decode.search.constraints import Constraints
from regard.decode.search.greedy import Paths
from regard.decode.search.hypothesis import Hypothesis
from regard.decode.search.rolling import GREEDY, RollingBeams, RollingPaths, Sampling
from regard.decode.search.sample import Sampled, uniforms

ROWS, ROWS_ON_GPU = 256, 4096
"""Rows of a batch, at most: sentences times beams. More are slower for each, and not faster for
all."""
STEPS = 4
"""Steps that an engine may take before it is asked who has finished, and who joins."""


@dataclass(frozen=True)
class Rules:
    """The search that the sentences of a lane share."""

    end: int
    banned: tuple[int, ...] = ()
    renormalize: bool = False
    beams: int = 1
    """Beam size; 1 is greedy search, or sampling."""
    n_best: int = 1
    length_penalty: float = 1.0
    sampling: Sampling = GREEDY
    horizon: int | None = None
    """How far ahead open hypotheses are hoped for: see `decode.search.beam`."""


@dataclass(eq=False)
class Sentence:
    """A text to be written by one search, and its callbacks."""

    source: Any
    """The model's input: a part of a text, pixels, or nothing."""
    prompt: list[int]
    """The tokens before those to be written."""
    most: int
    """Tokens to be written, at most."""
    rules: Rules
    answer: Callable[[list[Hypothesis]], None]
    """Receives its hypotheses, best first."""
    fail: Callable[[Exception], None]
    wanted: Callable[[], bool]
    """Checked before every step: False once the request is answered, cancelled or late."""
    stream: Callable[[list[int]], None] | None = None
    """Receives the tokens so far that can change no more, after every step."""
    index: int = 0
    """The number by which it draws."""
    place: int = field(default=-1, init=False)
    """In the arrays of its search."""


Opener: TypeAlias = Callable[..., Session]
"""How a model reads sources: from sentences, and the hints `beams` and `length`."""


class Batch:
    """Whatever a model is writing now."""

    def __init__(self, opener: Opener, longest: int):
        self._open, self._longest = opener, longest
        self._lanes: dict[Rules, Lane] = {}
        self._session: Session | None = None
        self._cohorts: list[Cohort] = []

    @property
    def rows(self) -> int:
        """Those that are computed."""
        lanes = sum(lane.rules.beams * len(lane.sentences) for lane in self._lanes.values())
        return lanes + sum(cohort.rows for cohort in self._cohorts)

    @property
    def busy(self) -> bool:
        """True if a step is needed, to compute or to answer."""
        return bool(self._lanes or self._cohorts)

    @property
    def cohorts(self) -> int:
        """Sessions that run by themselves, and take turns."""
        return sum(cohort.rows > 0 for cohort in self._cohorts)

    @property
    def sentences(self) -> list[Sentence]:
        lanes = [sentence for lane in self._lanes.values() for sentence in lane.sentences]
        return [*lanes, *(sentence for cohort in self._cohorts for sentence in cohort.sentences)]

    def join(self, sentences: Sequence[Sentence]) -> None:
        """Takes these in. One that cannot be read fails by itself."""
        by_rules: dict[Rules, list[Sentence]] = {}
        for sentence in sentences:
            by_rules.setdefault(sentence.rules, []).append(sentence)
        for rules, alike in by_rules.items():
            try:
                self._enter(rules, alike)
            except Exception as error:
                if len(alike) == 1:
                    alike[0].fail(error)
                    continue
                for sentence in alike:
                    self.join([sentence])

    @torch.inference_mode()
    def _enter(self, rules: Rules, sentences: list[Sentence]) -> None:
        """Their first step, which has a row for each, and then they join the others."""
        most = max(len(sentence.prompt) + sentence.most for sentence in sentences)
        session = self._open(sentences, beams=rules.beams, length=most + 1)
        try:
            if not session.shrinks:
                self._cohorts.append(Cohort(session, rules, sentences))
                return
            lane = self._lanes.get(rules) or Lane(rules, session.vocabulary, self._longest)
            stay, tokens, rows = lane.enter(sentences, session)
        except Exception:
            session.close()
            raise
        if not stay:
            session.close()
            return
        try:
            session.select(torch.from_numpy(rows))
            begin = self._join(session)
        except Exception as error:
            # Half of the rows may have joined: nothing that is computed can be trusted.
            session.close()
            self.clear(error)
            for sentence in stay:
                sentence.fail(error)
            return
        self._lanes[rules] = lane
        lane.follow(stay, tokens, begin + np.arange(len(rows)))

    def _join(self, session: Session) -> int:
        """Adds a session's rows to those that are computed; gives the first one's number."""
        if self._session is None:
            self._session = session
            return 0
        begin = self._session.rows
        self._session.join(session)
        return begin

    @torch.inference_mode()
    def step(self) -> None:
        """One more token for every sentence, or a few; who is finished, or given up, leaves."""
        for lane in self._lanes.values():
            lane.drop(lambda sentence: not sentence.wanted())
        self._lanes = {rules: lane for rules, lane in self._lanes.items() if lane.sentences}
        self._advance()
        if not self._lanes:
            self._close()
            return
        session = self._session
        assert session is not None
        lanes = list(self._lanes.values())
        rows = np.concatenate([lane.rows for lane in lanes])
        if len(rows) != session.rows or (rows != np.arange(len(rows))).any():
            session.select(torch.from_numpy(rows))
        if len(lanes) == 1:
            lanes[0].roll(session)
        else:
            last = np.concatenate([lane.last for lane in lanes])
            logits, begin = session.step(torch.from_numpy(last)), 0
            for lane in lanes:
                count = len(lane.rows)
                lane.extend(logits[begin : begin + count], session.best, begin)
                begin += count
        self._lanes = {rules: lane for rules, lane in self._lanes.items() if lane.sentences}
        if not self._lanes:
            self._close()

    def _advance(self) -> None:
        """A few steps of every cohort, which the device takes while others are answered."""
        for cohort in self._cohorts:
            cohort.launch()
        for cohort in self._cohorts:
            cohort.tell()
        for cohort in self._cohorts:
            cohort.look()
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows or cohort.results]

    def clear(self, error: Exception) -> None:
        """Gives up all that is running."""
        failed = self.sentences
        self._lanes.clear()
        for cohort in self._cohorts:
            cohort.session.close()
        self._cohorts.clear()
        self._close()
        for sentence in failed:
            sentence.fail(error)

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


class Lane:
    """Sentences of one kind of search, and the rows of the session that are theirs."""

    def __init__(self, rules: Rules, vocabulary: int, longest: int):
        self.rules = rules
        rule = Constraints(
            1,
            vocabulary,
            end=rules.end,
            max_length=longest,
            banned=rules.banned,
            renormalize=rules.renormalize,
        )
        self.search: Rolling
        if rules.beams == 1:
            self.search = RollingPaths(rule, rules.sampling)
        else:
            penalty = power(rules.length_penalty)
            shape = (rules.beams, rules.n_best)
            self.search = RollingBeams(rule, *shape, penalty, longest, rules.horizon)
        self.sentences: list[Sentence] = []
        self.last: Integers = np.zeros(0, np.int64)
        """The token that each row reads next."""
        self.rows: Integers = np.zeros(0, np.int64)
        """The session's row that each continues."""

    def enter(
        self, sentences: list[Sentence], session: Session
    ) -> tuple[list[Sentence], Integers, Integers]:
        """The first step of these; gives those that go on, their tokens and their rows."""
        last = session.begin([sentence.prompt for sentence in sentences]).cpu().numpy()
        for sentence in sentences:
            sentence.place = self.search.add(sentence.most, sentence.index)
        places = np.array([sentence.place for sentence in sentences])
        try:
            tokens, rows = session.roll(self.search, places, last)
        except Exception:
            for sentence in sentences:
                self.search.remove(sentence.place)
            raise
        return self._finish(sentences, tokens, rows)

    def follow(self, sentences: list[Sentence], tokens: Integers, rows: Integers) -> None:
        self.sentences += sentences
        self.last = np.concatenate((self.last, tokens))
        self.rows = np.concatenate((self.rows, rows))

    def roll(self, session: Session) -> None:
        """A few more tokens for all, who have all of the session's rows."""
        streams = any(sentence.stream is not None for sentence in self.sentences)
        steps = 1 if streams else STEPS
        self._update(*session.roll(self.search, self._places(), self.last, steps), 0)

    def extend(self, logits: torch.Tensor, best: Callable[..., Any], begin: int) -> None:
        """One more token for all; their rows begin at `begin` in the session."""
        self._update(*self.search.extend(self._places(), logits, best), begin)

    def _places(self) -> Integers:
        return np.array([sentence.place for sentence in self.sentences])

    def _update(self, tokens: Integers, rows: Integers, begin: int) -> None:
        self.sentences, self.last, rows = self._finish(self.sentences, tokens, rows)
        self.rows = begin + rows

    def _finish(
        self, sentences: list[Sentence], tokens: Integers, rows: Integers
    ) -> tuple[list[Sentence], Integers, Integers]:
        """Answers sentences that have ended; gives the others with their tokens and rows."""
        going = [not self.search.over(sentence.place) for sentence in sentences]
        for sentence, goes_on in zip(sentences, going):
            try:
                if not goes_on:
                    sentence.answer(self.search.hypotheses(sentence.place))
                elif sentence.stream is not None:
                    sentence.stream(self.search.stable_prefix(sentence.place))
            except Exception as error:
                sentence.fail(error)
            if not goes_on:
                self.search.remove(sentence.place)
        if all(going):
            return sentences, tokens, rows
        open_rows = np.repeat(going, self.rules.beams)
        stay = [sentence for sentence, goes_on in zip(sentences, going) if goes_on]
        return stay, tokens[open_rows], rows[open_rows]

    def drop(self, unwanted: Callable[[Sentence], bool]) -> None:
        staying = [not unwanted(sentence) for sentence in self.sentences]
        if all(staying):
            return
        for sentence, stays in zip(self.sentences, staying):
            if not stays:
                self.search.remove(sentence.place)
        self.sentences = [s for s, stays in zip(self.sentences, staying) if stays]
        rows = np.repeat(staying, self.rules.beams)
        self.last, self.rows = self.last[rows], self.rows[rows]


class Cohort:
    """Sentences that came together, in a session that runs their search by itself."""

    def __init__(self, session: Session, rules: Rules, sentences: list[Sentence]):
        self.session, self.rules, self.sentences = session, rules, sentences
        self.results: list[tuple[Sentence, Callable[[], list[Hypothesis]]]] = []
        """Sentences to be answered, and how their hypotheses are read."""
        self._told: set[int] = set()
        self._running = True
        rule = Constraints(
            len(sentences),
            session.vocabulary,
            end=rules.end,
            max_length=[sentence.most for sentence in sentences],
            banned=rules.banned,
            renormalize=rules.renormalize,
            device=session.device,
        )
        last, how = session.begin([sentence.prompt for sentence in sentences]), rules.sampling
        self.search: Beams | Paths
        if rules.beams > 1:
            penalty = power(rules.length_penalty)
            shape, kind = (rules.beams, rules.n_best), session.scores
            self.search = Beams(last, rule, *shape, penalty, kind, rules.horizon)
        elif how.temperature > 0:
            indices = [sentence.index for sentence in sentences]
            dice = torch.from_numpy(uniforms(how.seed, indices, rule.steps))
            self.search = Sampled(last, rule, dice, how.temperature, how.top_k, how.top_p)
        else:
            self.search = Paths(last, rule)

    @property
    def rows(self) -> int:
        return len(self.sentences) * self.rules.beams if self._running else 0

    def launch(self) -> None:
        """Launches a few steps asynchronously, unless all requests were cancelled."""
        if self._running and not any(sentence.wanted() for sentence in self.sentences):
            self._end()
        if self._running:
            self.session.advance(self.search)

    def tell(self) -> None:
        """Answers those that were found at the last look."""
        ready, self.results = self.results, []
        for sentence, read in ready:
            try:
                sentence.answer(read())
            except Exception as error:
                sentence.fail(error)

    def look(self) -> None:
        """Waits for the steps, and reads results once half of the sentences have ended."""
        if not self._running:
            return
        search = self.search
        if isinstance(search, Paths) and any(sentence.stream for sentence in self.sentences):
            self._stream(search)
        over = search.over.tolist()
        ended = [n for n, done in enumerate(over) if done and n not in self._told]
        # To read a few costs as much as to read all.
        if not all(over) and 2 * len(ended) < len(over):
            return
        readers = search.readers()
        self.results = [(self.sentences[n], readers[n]) for n in ended]
        self._told.update(ended)
        if all(over):
            self._end()

    def _end(self) -> None:
        self._running = False
        self.session.close()

    def _stream(self, search: Paths) -> None:
        written = search.tokens[:, : search.t].tolist()
        for n, (sentence, tokens) in enumerate(zip(self.sentences, written)):
            if sentence.stream is not None and n not in self._told:
                end = tokens.index(self.rules.end) if self.rules.end in tokens else len(tokens)
                sentence.stream(tokens[: min(end, sentence.most)])
