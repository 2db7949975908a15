"""The console script `splitpool`: one function a subcommand, one line on stderr for a refusal."""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

from app import config, facts
from app.errors import SplitpoolError
from app.model import DEFAULT_OUT, prepare
from app.pools import preflight
from app.replay import replay
from app.routing.table import RoutingTable


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
    again = _command(
        commands, "replay", "count where recorded requests would go under other settings",
        "--facts facts.jsonl --set routing.long_prompt_tokens=4096",
    )  # fmt: skip
    again.add_argument("--facts", type=Path, required=True, help="what routing.facts_file recorded")
    again.add_argument(
        "--config", type=Path, default=Path("serve_configs/local.yaml"), help="the settings then"
    )
    again.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting to change"
    )
    again.set_defaults(run=_replay)
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
    preflight.check(settings)
    preflight.check_arguments(settings)
    preflight.check_cpu(settings)
    print(config.effective(settings), flush=True)
    serve = str(Path(sys.executable).parent / "serve")
    os.execv(serve, [serve, "run", str(options.file)])


def _replay(options: argparse.Namespace) -> None:
    then = config.load(options.config)
    now = config.changed(then, options.set)
    found = replay(facts.read(options.facts), _side(then), _side(now))
    print(f"{found.requests} requests, recorded as", _counts(found.recorded))
    for (sla_class, pool), count in sorted(found.homes.items()):
        print(f"{count:8} {sla_class} to {pool}")
    for (old, new), count in sorted(found.moved.items()):
        print(f"{count:8} moved: {old} -> {new}")
    if found.unsettled:
        print(f"{found.unsettled:8} unsettled: never counted, and a threshold is within the bounds")


def _side(settings: config.AppSettings) -> tuple[RoutingTable, int]:
    return settings.routing.destinations(), settings.routing.long_prompt_tokens


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items())) or "nothing"
