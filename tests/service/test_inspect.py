"""A look inside a model happens between the steps of those who are being answered."""

from pathlib import Path
from typing import Any

import pytest

from regard.look.effect import changed
from regard.service import Service, Translate
from tests.service.samples import TEXTS, translator


def test_a_change_inside_is_nobody_elses(tmp_path: Path) -> None:
    translator(tmp_path / "run")
    with Service(device="cpu") as service:
        service.add(tmp_path / "run")
        alone = [one.text for one in service.ask(Translate(texts=tuple(TEXTS[:12])))]

        def look(model: Any) -> str:
            name = "decoder.blocks.0.cross"
            with changed(model.model, off=[(name, 0), (name, 1)]):
                return str(model.translate([TEXTS[0]], beams=1)[0])

        asked = service.submit(Translate(texts=tuple(TEXTS[:12])))
        looks = [service.inspect("run", look) for _ in range(5)]
        assert [one.text for one in asked.result()] == alone
        assert len({found.result() for found in looks}) == 1
        assert [one.text for one in service.ask(Translate(texts=tuple(TEXTS[:12])))] == alone


def test_what_fails_inside_is_said_to_who_asked(tmp_path: Path) -> None:
    translator(tmp_path / "run")
    with Service(device="cpu") as service:
        service.add(tmp_path / "run")
        with pytest.raises(ZeroDivisionError):
            service.inspect("run", lambda model: 1 // 0).result()
        with pytest.raises(ValueError, match="there is no such model; there are run"):
            service.inspect("other", lambda model: None).result()
        assert service.inspect("run", lambda model: type(model).__name__).result() == "Translator"
        assert service.counts.failed == 2
