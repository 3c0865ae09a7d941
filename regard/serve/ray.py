"""The same service on Ray Serve, beyond one machine: as many replicas as there are GPUs or nodes.

    from ray import serve
    from regard.serve.ray import application

    serve.run(application({"en-de": "/models/en-de"}, replicas=2, precision="int8"))

A replica is the HTTP application over a service in its own process. Ray routes, restarts and
scales.
"""

from collections.abc import Mapping
from typing import Any

from regard.serve.app import Options, create
from regard.serve.backend import InProcess


def application(
    models: Mapping[str, str],
    *,
    replicas: int = 1,
    options: Options | None = None,
    device: str = "auto",
    precision: str = "fp32",
    **resources: Any,
) -> Any:
    """A Ray Serve application of folders by their names; `resources` such as num_gpus are Ray's."""
    from ray import serve

    given = (dict(models), options or Options(), device, precision)
    replica: Any = serve.ingress(lambda: _build(*given))(type("Regard", (), {}))
    deployment: Any = serve.deployment(num_replicas=replicas, ray_actor_options=resources or None)
    return deployment(replica).bind()


def _build(models: Mapping[str, str], options: Options, device: str, precision: Any) -> Any:
    """In a replica: the service, and the application over it."""
    from regard.service.service import Service

    service = Service(options.limits, device=device, precision=precision)
    for name, folder in models.items():
        service.add(folder, name)
    return create(InProcess(service), options)
