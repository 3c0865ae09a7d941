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

    chosen = options or Options()

    def build() -> Any:
        from regard.service.service import Service

        service = Service(chosen.limits, device=device, precision=precision)  # type: ignore[arg-type]
        for name, folder in models.items():
            service.add(folder, name)
        return create(InProcess(service), chosen)

    @serve.deployment(num_replicas=replicas, ray_actor_options=resources or None)
    @serve.ingress(build)
    class Regard:
        pass

    deployment: Any = Regard
    return deployment.bind()
