"""The command line: words in, words out.

A command imports what it needs when it is chosen, so that `regard --help` answers at once.
Whatever a user can set right is said in one line that begins with `regard:`; `regard --debug` shows
the traceback instead.
"""

import argparse
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import cast

from regard import __version__
from regard.cli.driver import ANSWERING, starting
from regard.cli.errors import guarded, prepare_streams, uninterrupted
from regard.machine import GC_THRESHOLD
from regard.machine.command_line import Parser, check_columns, check_words


def _demo(options: argparse.Namespace) -> None:
    if options.name == "byhand":
        from regard.lab.byhand import demo as by_hand

        by_hand()
        return
    from pathlib import Path

    from regard.cli.demo import demo

    demo(options.name, Path(options.run_folder or f"runs/demo-{options.name}"))


def _command(name: str) -> Callable[[Sequence[str]], int | None]:
    """A command that reads its flags itself."""
    match name:
        case "train":
            from regard.cli.train import train

            return train
        case "evaluate":
            from regard.cli.evaluate import evaluate

            return evaluate
        case "check":
            from regard.cli.check import check

            return check
        case "compare":
            from regard.cli.compare import compare

            return compare
        case "attend":
            from regard.lab.commands.attend import attend

            return attend
        case "completion":
            from regard.cli.completion import completion

            def asked(words: list[str]) -> None:
                options = _parser().parse_args(words)
                options.run(options)

            return lambda words: completion(words, asked)
        case "help":
            from regard.cli.search import help_

            return lambda words: help_(words, _parser())
        case "doctor":
            from regard.cli.doctor import doctor

            return doctor
        case "cost":
            from regard.lab.commands.cost import cost

            return cost
        case "lab":
            from regard.lab.commands.lab import lab

            return lab
        case "serve":
            from regard.cli.serve import serve

            return serve
        case "look":
            from regard.cli.look import look

            return look
        case "studio":
            from regard.cli.studio import studio

            return studio
    from regard.cli import predict

    assert name in ANSWERING
    return cast(Callable[[Sequence[str]], int | None], getattr(predict, name))


def _import(options: argparse.Namespace) -> None:
    from regard.cli.convert import import_

    import_(options.source, options.folder)


def _export(options: argparse.Namespace) -> None:
    from regard.cli.convert import export

    export(options.folder, options.out, options.to, options.precision)


def _average(options: argparse.Namespace) -> None:
    from regard.cli.average import average

    average(options.folders, options.out)


def _recipes(options: argparse.Namespace) -> None:
    from regard.cli.recipes import recipes

    recipes(options.name)


def _quantize(options: argparse.Namespace) -> None:
    from regard.cli.quantize import quantized

    quantized(options.folder, options.out)


GROUPS = {
    "Train a model": "demo train evaluate compare average recipes",
    "Use a model": "translate score classify read generate label serve",
    "Look inside a model": "look studio check",
    "Convert a model": "import export quantize",
    "Learn about attention": "attend cost lab",
    "Get help": "help doctor completion",
}
"""The commands, as `regard --help` shows them."""


class _Formatter(argparse.HelpFormatter):
    """Shows the commands in groups, each beside its explanation."""

    def _format_action(self, action: argparse.Action) -> str:
        if not isinstance(action, argparse._SubParsersAction):
            return super()._format_action(action)
        about = {choice.dest: choice.help for choice in action._choices_actions}
        lines = []
        for title, names in GROUPS.items():
            lines += [f"  {title}", *(f"    {name:<12}{about[name]}" for name in names.split())]
        return "\n".join([*lines, ""])


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="regard",
        description="Train, run and inspect Transformers.",
        allow_abbrev=False,
        formatter_class=_Formatter,
    )
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error, not one line"
    )
    parser.add_argument("--version", action="version", version=f"regard {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    demo = commands.add_parser(
        "demo",
        help="train a small model, and show what it has learned",
        description="Trains a small model in a minute or two, and shows what it has learned: "
        "dates in many languages, handwritten digits, or strips of digits to read. byhand steps "
        "through attention itself, table by table, and draws the masks.",
    )
    demo.add_argument(
        "name", nargs="?", default="dates", choices=["dates", "digits", "read", "byhand"]
    )
    demo.add_argument("--run", dest="run_folder", help="where to keep it: runs/demo-NAME")
    demo.set_defaults(run=_demo)

    # These read their flags themselves: what begins with a dash is theirs.
    for name, about in (
        ("train", "train a model on your own data"),
        ("evaluate", "score a trained model"),
        ("check", "check that all execution paths of a model agree numerically"),
        ("compare", "test whether one run translates significantly better than another"),
        ("translate", "translate lines of text"),
        ("score", "score given translations"),
        ("classify", "classify images"),
        ("read", "read the text in images"),
        ("generate", "continue a text with a language model"),
        ("label", "classify texts"),
        ("look", "show what a model attended to, and whether it mattered"),
        ("studio", "explore attention and your models in the browser"),
        ("attend", "compute attention by hand, step by step"),
        ("cost", "count the cost of a layer or a model, and show the formula"),
        ("lab", "run textbook claims about attention as experiments"),
        ("help", "find commands and flags by words: regard help beam size"),
        ("doctor", "check PyTorch, GPU, compiler and optional packages"),
        ("completion", "print a completion script for bash, zsh or fish"),
        ("serve", "serve models over HTTP"),
    ):
        command = commands.add_parser(name, help=about, add_help=False, prefix_chars="\0")
        command.add_argument("words", nargs=argparse.REMAINDER)
        command.set_defaults(run=lambda options: _command(options.command)(options.words))
        command.set_defaults(command=name)

    average = commands.add_parser(
        "average",
        help="average the weights of several models",
        description="Averages the weights of models of one shape: the best checkpoints that a run "
        "has kept (--training.keep-best), or several folders.",
    )
    average.add_argument("folders", nargs="+", metavar="RUN", help="runs, or models' folders")
    average.add_argument("out", help="the folder to write, which must be new")
    average.set_defaults(run=_average)

    recipes = commands.add_parser(
        "recipes",
        help="list training recipes with known scores",
        description="Lists the recipes: runs whose scores can be compared with published ones. "
        "With a name, what that one needs and what it gives.",
    )
    recipes.add_argument("name", nargs="?", metavar="NAME", help="a recipe")
    recipes.set_defaults(run=_recipes)

    quantize = commands.add_parser(
        "quantize",
        help="store a model's weights in 8 bits",
        description="Quantizes a model's linear layers to weights of 8 bits. The new folder is "
        "used as any other. These layers take a quarter of the space; embeddings stay as they "
        "are. On a CPU it is the fastest.",
    )
    quantize.add_argument("folder", metavar="RUN", help="a run, or a model's folder")
    quantize.add_argument("out", help="the folder to write, which must be new")
    quantize.set_defaults(run=_quantize)

    import_ = commands.add_parser(
        "import",
        help="convert another library's model to a Regard folder",
        description="Turns a Marian translator, a CTranslate2 folder or a ViT, of Hugging Face's "
        "or timm's, into a Regard folder: the same weights, config and tokenizer.",
    )
    import_.add_argument("source", help="a folder, a file in it, or a name on the hub")
    import_.add_argument("folder", help="the Regard folder to write, which must be new")
    import_.set_defaults(run=_import)

    export = commands.add_parser(
        "export",
        help="convert a Regard folder to another library's format",
        description="Turns a Regard folder into one that another library opens, with the same "
        "results, or says why that library has no such model.",
    )
    export.add_argument("folder", help="the Regard folder to read, a model's or a run's")
    export.add_argument("out", help="the folder to write, which must be new")
    export.add_argument(
        "--to",
        required=True,
        choices=["ctranslate2", "onnx", "torch-export", "marian", "vit"],
        help="the format",
    )
    export.add_argument(
        "--precision",
        default="fp32",
        choices=["fp32", "bf16", "fp16", "int8"],
        help="of the weights, for CTranslate2; by default fp32",
    )
    export.set_defaults(run=_export)
    return parser


def share_cores() -> None:
    """Has torch's threads sleep sooner while they wait for each other.

    Those of GNU OpenMP spin for milliseconds. On a busy machine one may then keep the core on which
    the other would do what it waits for, and both are ten times as slow. It is read from here when
    torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "4000")


def import_torch() -> None:
    """Imports torch with garbage collection off.

    Its hundreds of thousands of objects live as long as the process: traversing them repeatedly
    took a quarter of the time of a short command.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import torch  # noqa: F401

        gc.freeze()
    finally:
        gc.enable()


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code, of which `cli/errors.py` has the list."""
    prepare_streams()
    share_cores()
    given = sys.argv[1:] if words is None else list(words)
    asks = bool({"-h", "--help", "--help-all"} & set(given))
    if asks and words is None:
        gc.disable()  # a help message creates too little garbage to collect

    def run() -> int | None:
        check_words(given)
        check_columns()
        options = _parser().parse_args(given)
        if given[0] not in ("lab", "studio", "serve", "help") and not asks:
            with uninterrupted(), starting(given):
                import_torch()
        if given[0] in ANSWERING and words is None:
            gc.set_threshold(GC_THRESHOLD)
        status: int | None = options.run(options)
        return status

    try:
        return guarded(run, debug=given[:1] == ["--debug"])
    finally:
        if words is None:
            # All is done, and Ctrl-C would only be reported from the midst of Python's own end,
            # which needs no garbage collection either.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            gc.freeze()
