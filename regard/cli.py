"""The command line: words in, words out.

A command imports what it needs when it is chosen, so that `regard --help` answers at once.
Whatever a user can set right is said in one line that begins with `regard:`.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from regard import __version__


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"regard: {message}; see regard --help\n")


def _demo(options: argparse.Namespace) -> None:
    if options.name == "byhand":
        from regard.lab.byhand import demo as by_hand

        by_hand()
        return
    from pathlib import Path

    from regard.task.demo import demo

    demo(options.name, Path(options.run_folder or f"runs/demo-{options.name}"))


def _train(options: argparse.Namespace) -> None:
    from regard.task.command import train

    train(options.words)


def _evaluate(options: argparse.Namespace) -> None:
    from regard.task.command import evaluate

    evaluate(options.words)


def _use(options: argparse.Namespace) -> None:
    from regard.task import use

    match options.command:
        case "translate":
            use.translate(options.words)
        case "classify":
            use.classify(options.words)
        case "read":
            use.read(options.words)
        case "generate":
            use.generate(options.words)
        case "label":
            use.label(options.words)


def _attend(options: argparse.Namespace) -> None:
    from regard.lab.attend_command import attend

    attend(options.words)


def _cost(options: argparse.Namespace) -> None:
    from regard.lab.cost_command import cost

    cost(options.words)


def _lab(options: argparse.Namespace) -> int:
    from regard.lab.command import lab

    return lab(
        options.names,
        everything=options.all,
        as_json=options.json,
        report=options.report,
        plot=options.plot,
    )


def _import(options: argparse.Namespace) -> None:
    from regard import checkpoint, interop

    imported = interop.read(options.source)
    checkpoint.save(
        options.folder,
        imported.model,
        files=imported.files,
        task=imported.task,
        origin=imported.origin,
    )
    for note in imported.notes:
        print("regard:", note, file=sys.stderr)
    parameters = sum(parameter.numel() for parameter in imported.model.parameters())
    kind = type(imported.model).__name__
    print(f"{options.folder}: a {kind} of {parameters:,} parameters")


def _export(options: argparse.Namespace) -> None:
    from regard import checkpoint, interop
    from regard.task.load import model_folder

    saved = checkpoint.load(model_folder(options.folder))
    interop.write(saved.model, options.out, options.to, files=saved.files, task=saved.task)
    print(f"{options.out}: a {options.to} model for transformers")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="regard",
        description="The Transformer, complete, fast and see-through.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"regard {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo = commands.add_parser(
        "demo",
        help="watch a small model learn, and see what it has learned",
        description="Trains a small model in a minute or two, and shows what it has learned: "
        "dates in many languages, handwritten digits, or strips of digits to read. byhand steps "
        "through attention itself, table by table, and draws the masks.",
    )
    demo.add_argument(
        "name", nargs="?", default="dates", choices=["dates", "digits", "read", "byhand"]
    )
    demo.add_argument("--run", dest="run_folder", help="where to keep it: runs/demo-NAME")
    demo.set_defaults(run=_demo)

    # Their settings are read elsewhere: what begins with a dash is theirs.
    for name, run, about in (
        ("train", _train, "train a model on data of one's own"),
        ("evaluate", _evaluate, "score a trained model"),
        ("translate", _use, "translate lines of text"),
        ("classify", _use, "say what is in pictures"),
        ("read", _use, "read the text in pictures"),
        ("generate", _use, "go on with a text"),
        ("label", _use, "say which class a text is in"),
        ("attend", _attend, "work out attention by hand, step by step"),
        ("cost", _cost, "count what a layer or a model costs, beside the formula"),
    ):
        command = commands.add_parser(name, help=about, add_help=False, prefix_chars="\0")
        command.add_argument("words", nargs=argparse.REMAINDER)
        command.set_defaults(run=run, command=name)

    lab = commands.add_parser(
        "lab",
        help="try what is taught about attention, with a verdict",
        description="Experiments about what course documents teach: what is said, what is "
        "computed, the numbers, the verdict that follows from them, and what is true. Without a "
        "name it lists them; `regard lab exercise multihead` or `vit` writes a notebook to fill in "
        "into a folder.",
    )
    lab.add_argument("names", nargs="*", metavar="NAME", help="an experiment, an item or a group")
    lab.add_argument("--all", action="store_true", help="run every experiment")
    lab.add_argument("--json", action="store_true", help="print what was found as JSON alone")
    lab.add_argument("--report", metavar="FILE", help="write a page, FILE.html, with everything")
    lab.add_argument("--plot", metavar="FILE", help="write the experiments' plots, FILE.svg")
    lab.set_defaults(run=_lab)

    import_ = commands.add_parser(
        "import",
        help="turn another library's model into a Regard folder",
        description="Turns a Marian translator or a ViT, of Hugging Face's or timm's, into a "
        "Regard folder: the same weights, config and tokenizer.",
    )
    import_.add_argument("source", help="a folder, a file in it, or a name on the hub")
    import_.add_argument("folder", help="the Regard folder to write")
    import_.set_defaults(run=_import)

    export = commands.add_parser(
        "export",
        help="turn a Regard folder into another library's model",
        description="Turns a Regard folder into one that another library opens, with the same "
        "results, or says why that library has no such model.",
    )
    export.add_argument("folder", help="the Regard folder to read, a model's or a run's")
    export.add_argument("out", help="the folder to write, which must be new")
    export.add_argument("--to", required=True, choices=["marian", "vit"], help="the format")
    export.set_defaults(run=_export)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    1 means that something it tried failed, 2 that the words or the data were wrong; 130 and 141
    are what a shell reports for a command that was interrupted or whose reader went away.
    """
    try:
        options = _parser().parse_args(words)
        status: int | None = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python flushes once more at exit, and would complain about the closed pipe then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print("regard:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return status or 0
