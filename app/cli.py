"""The console script `splitpool`: one function a subcommand, one line on stderr for a refusal."""

import argparse
import os
import sys
from pathlib import Path

from app import config
from app.errors import SplitpoolError
from app.model import DEFAULT_OUT, prepare
from app.pools import weights


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand; 0 if it succeeded, 1 with a message if it was refused."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except SplitpoolError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="splitpool")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    model = _command(commands, "model", "prepare the local chat model", f"--out {DEFAULT_OUT}")
    model.add_argument("--out", type=Path, default=DEFAULT_OUT, help="directory to write")
    model.set_defaults(run=_model)
    check = _command(
        commands, "config", "check a Serve config file and print it with every default",
        "serve_configs/local.yaml",
    )  # fmt: skip
    check.add_argument("file", type=Path, help="the file")
    check.set_defaults(run=_config)
    serve = _command(
        commands, "serve", "check a Serve config file, then run it", "serve_configs/local.yaml"
    )
    serve.add_argument("file", type=Path, help="the file")
    serve.set_defaults(run=_serve)
    return parser


def _command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str,
             help_text: str, example: str) -> argparse.ArgumentParser:  # fmt: skip
    return commands.add_parser(
        name, help=help_text, description=help_text, epilog=f"example: splitpool {name} {example}"
    )


def _model(options: argparse.Namespace) -> None:
    prepare(options.out)


def _config(options: argparse.Namespace) -> None:
    print(config.effective(config.load(options.file)))


def _serve(options: argparse.Namespace) -> None:
    """Becomes `serve run`, which alone would try a bad file again and again and never end."""
    settings = config.load(options.file)
    weights.check(settings)
    print(config.effective(settings), flush=True)
    serve = str(Path(sys.executable).parent / "serve")
    os.execv(serve, [serve, "run", str(options.file)])
