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
    schemathesis = pytest.importorskip("schemathesis", reason="make test-all installs it")
    from hypothesis import HealthCheck, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import positive_data_acceptance

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

            @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
            @given(case=strategy)
            def check(case: object) -> None:
                nonlocal tried
                tried += 1
                # Limits and models refuse what a schema cannot tell; and a client who gives 5 ms
                # is told, by 504, that they are over.
                answer = case.call_and_validate(  # type: ignore[attr-defined]
                    timeout=HANG,
                    excluded_checks=[positive_data_acceptance, not_a_server_error],
                )
                assert answer.status_code in (503, 504) or answer.status_code < 500

            check()
        assert tried > 200
