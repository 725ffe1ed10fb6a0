"""``dcpstore demo``: the whole of it on one machine."""

from __future__ import annotations

import argparse

from dcpstore.cli.output import ExitCode, Output
from dcpstore.errors import ConfigError

DESCRIPTION = """\
Start an S3 server on this machine, train a small transformer under FSDP2 on four processes,
save it half way, load it into new jobs on two and on four processes, and compare every bit.
Needs no account, no GPU and no network; leaves nothing behind."""

EXAMPLES = """\
dcpstore demo                               # about a minute on two cores
dcpstore demo --keep-server                 # then look around with `dcpstore ls`
dcpstore demo --save-ranks 2 --load-ranks 1 --steps 6"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from dcpstore.demo.job import NUM_MICRO_BATCHES, ModelConfig

    ranks = [n for n in range(1, NUM_MICRO_BATCHES + 1) if NUM_MICRO_BATCHES % n == 0]
    model = ModelConfig()
    numbers = "(%(default)s)"
    parser.add_argument("--save-ranks", type=int, choices=ranks, default=4, help=numbers)
    parser.add_argument("--load-ranks", type=int, choices=ranks, default=2, help=numbers)
    parser.add_argument(
        "--steps", type=int, default=20, help=f"at least 2; saves half way {numbers}"
    )
    parser.add_argument("--seed", type=int, default=0, help=numbers)
    parser.add_argument("--width", type=int, default=model.width, help=f"a multiple of 4 {numbers}")
    parser.add_argument("--layers", type=int, default=model.num_layers, help=numbers)
    parser.add_argument("--keep-server", action="store_true", help="until ctrl-C")


def run(args: argparse.Namespace, out: Output) -> ExitCode:
    """Run it; see `dcpstore.demo`."""
    from dcpstore.demo.job import ModelConfig
    from dcpstore.demo.launch import RanksError
    from dcpstore.demo.run import Options, run_demo

    if args.steps < 2 or args.width < 4 or args.width % 4 or args.layers < 1:
        raise ConfigError("needs --steps >= 2, --width a multiple of 4, --layers >= 1")
    options = Options(
        save_ranks=args.save_ranks,
        load_ranks=args.load_ranks,
        num_steps=args.steps,
        seed=args.seed,
        keep_server=args.keep_server,
        model=ModelConfig(width=args.width, num_layers=args.layers),
    )
    say = out.note if out.as_json else out.line
    try:
        checks = run_demo(options, say)
    except RanksError as error:
        say(f"FAIL  {error}")
        return ExitCode.FINDING
    if out.as_json:
        found = [{"claim": check.claim, "passed": check.passed} for check in checks]
        out.result("dcpstore.demo/1", {"checks": found}, ())
    return ExitCode.OK if all(check.passed for check in checks) else ExitCode.FINDING
