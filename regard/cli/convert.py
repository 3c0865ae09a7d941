"""The commands `import` and `export`: other libraries' models in, and out again."""

import sys

from regard import checkpoint, interop
from regard.task.folder import check_new, model_folder
from regard.task.specs import NAMES, spec


def import_(source: str, folder: str) -> None:
    """`regard import SOURCE FOLDER`."""
    check_new(folder)
    imported = interop.read(source)
    task = imported.task
    if task is not None and task.get("name") in NAMES:
        task = {**task, "example": spec(task["name"]).example}
    checkpoint.save(folder, imported.model, files=imported.files, task=task, origin=imported.origin)
    for note in imported.notes:
        print("regard:", note, file=sys.stderr)
    parameters = sum(parameter.numel() for parameter in imported.model.parameters())
    print(f"{folder}: a {type(imported.model).__name__} of {parameters:,} parameters")


def export(folder: str, out: str, to: str, precision: str) -> None:
    """`regard export FOLDER OUT --to FORMAT`."""
    saved = checkpoint.load(model_folder(folder))
    verified = interop.write(
        saved.model, out, to, files=saved.files, task=saved.task, precision=precision
    )
    print(f"{out}: {verified}")
