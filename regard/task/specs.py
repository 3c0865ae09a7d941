"""Every task by its name. A task is imported at its first use."""

from regard.checkpoint import TASKS
from regard.task.spec import TaskSpec

NAMES = TASKS


def spec(name: str) -> TaskSpec:
    match name:
        case "translate":
            from regard.task.translate import TASK
        case "dates":
            from regard.task.dates import TASK
        case "classify":
            from regard.task.classify import TASK
        case "read":
            from regard.task.read import TASK
        case "language":
            from regard.task.language import TASK
        case "label":
            from regard.task.label import TASK
        case "encoder":
            from regard.task.encoder import TASK
        case _:
            raise ValueError(f"task ({name!r}) is unknown; choose from {', '.join(NAMES)}")
    return TASK
