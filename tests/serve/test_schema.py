"""The OpenAPI document is true: Schemathesis sends what it allows, and what it does not."""

from pathlib import Path

import pytest

from regard.serve.app import Options, create
from regard.serve.backend import InProcess
from regard.service import Limits, Service
from tests.processes import HANG
from tests.service.samples import classifier, generator, labeler, reader, translator

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked")]


def test_the_document(tmp_path: Path) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="an extra: regard[fuzz]")
    from hypothesis import HealthCheck, given, settings

    limits = Limits(characters=500, texts=20, tokens=20, beams=6, seconds=float(HANG))
    with Service(limits) as service:
        service.add(translator(tmp_path / "en-de"))
        service.add(generator(tmp_path / "stories"))
        service.add(labeler(tmp_path / "moods"))
        service.add(classifier(tmp_path / "kinds"))
        service.add(reader(tmp_path / "scans"))
        app = create(InProcess(service), Options(limits=limits))
        schema = schemathesis.openapi.from_asgi("/openapi.json", app)
        tried = 0
        for operation in schema.get_all_operations():
            strategy = operation.ok().as_strategy()

            @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
            @given(case=strategy)
            def check(case: object) -> None:
                nonlocal tried
                tried += 1
                case.call_and_validate(timeout=HANG)  # type: ignore[attr-defined]

            check()
        assert tried > 300
