"""``dcpstore retain``: which steps of a run stay, and the end of the others."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, Literal, cast

from dcpstore.cli.connection import add_connection_arguments, read_connection
from dcpstore.cli.output import (
    ExitCode,
    Output,
    format_age,
    format_metrics,
    metrics_document,
    table,
)
from dcpstore.errors import ConfigError, NotFoundError
from dcpstore.manager.policies import (
    AtSteps,
    Best,
    EverySeconds,
    EverySteps,
    KeepPolicy,
    Latest,
    StepFacts,
    Verdict,
)
from dcpstore.manager.retention import Retired, plan, retire
from dcpstore.manager.run import Run
from dcpstore.text import count_text, size_text

DESCRIPTION = """\
Decide which checkpoints of a run stay, by one or more policies: a step stays if any of them keeps
it. Shows what stays, what goes and why, and deletes nothing unless --yes is given. Always stay:
the newest step, pinned ones, and the one that a job resumed from until it has sealed a newer one;
steps of another run or of other writers stay unless --others is given. A checkpoint that goes
loses its .metadata first, so that none is ever half there. What interrupted saves left is for
`dcpstore prune`."""

EXAMPLES = """\
dcpstore retain s3://bucket/run --latest 3                       # show what would go
dcpstore retain s3://bucket/run --latest 3 --every 10000 --yes   # delete it
dcpstore retain s3://bucket/run --best 2:val_loss:min --step 500
dcpstore retain s3://bucket/run --every-seconds 86400 --others   # steps of others, too"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("url", metavar="RUN_URL", help="URL or local folder of a run")
    keep = parser.add_argument_group("policies")
    keep.add_argument("--latest", type=int, metavar="N", help="keep the N latest steps")
    keep.add_argument(
        "--every", type=int, metavar="N", help="keep the steps that are multiples of N"
    )
    keep.add_argument(
        "--every-seconds", type=float, metavar="S", help="keep one step for every S seconds"
    )
    keep.add_argument(
        "--best",
        action="append",
        default=[],
        metavar="N:METRIC:min|max",
        help="keep the N steps whose METRIC is lowest or highest; repeatable",
    )
    keep.add_argument(
        "--step", type=int, action="append", default=[], metavar="N", help="keep it; repeatable"
    )
    parser.add_argument("--yes", "--delete", action="store_true", help="delete what goes")
    parser.add_argument(
        "--others",
        action="store_true",
        help="decide about steps of other runs and of other writers, too",
    )
    add_connection_arguments(parser)


def run(args: argparse.Namespace, out: Output) -> ExitCode:
    """Decide, and delete if told so; see `dcpstore.manager.retention`."""
    policies = _policies(args)
    connection = read_connection(args, args.url, out)
    with Run(connection.url, connection.storage_options, connection.config) as at:
        verdicts = plan(at, policies, others=args.others)
        if not verdicts:
            raise NotFoundError(
                f"{at.url} has no sealed step: a step is a folder such as step-100 with a"
                f" checkpoint in it. `dcpstore ls {at.url}` lists what is there"
            )
        facts = {one.folder: one for one in at.facts()}
        done = {one.folder: one for one in retire(at, verdicts)} if args.yes else {}
    url = at.url
    rows = [
        # One that another removal has just taken is not known any more.
        (one, facts.get(one.folder) or StepFacts(one.step, one.folder), done.get(one.folder))
        for one in verdicts
    ]
    now = datetime.now(timezone.utc)
    document = {"url": url, "dry_run": not args.yes, "steps": [_fields(*row) for row in rows]}
    out.result("dcpstore.retain/1", document, _lines(rows, done, args, now))
    return ExitCode.FINDING if any(one.why_not for one in done.values()) else ExitCode.OK


def _policies(args: argparse.Namespace) -> list[KeepPolicy]:
    policies: list[KeepPolicy] = []
    if args.latest is not None:
        policies.append(Latest(args.latest))
    if args.every is not None:
        policies.append(EverySteps(args.every))
    if args.every_seconds is not None:
        policies.append(EverySeconds(args.every_seconds))
    policies += map(_read_best, args.best)
    if args.step:
        policies.append(AtSteps(*args.step))
    if not policies:
        raise ConfigError(
            "dcpstore retain needs to know what stays: give --latest, --every, --every-seconds,"
            " --best or --step"
        )
    return policies


def _read_best(text: str) -> Best:
    number, _, rest = text.partition(":")
    metric, _, mode = rest.rpartition(":")
    try:
        return Best(int(number), metric, cast("Literal['min', 'max']", mode))
    except ValueError:
        raise ConfigError(f"--best {text!r} must be N:METRIC:min or N:METRIC:max") from None
    except ConfigError as error:
        raise ConfigError(
            f"--best {text!r} must be N:METRIC:min or N:METRIC:max: {error}"
        ) from error


def _lines(
    rows: Sequence[tuple[Verdict, StepFacts, Retired | None]],
    done: Mapping[str, Retired],
    args: argparse.Namespace,
    now: datetime,
) -> Iterator[str]:
    yield from table(
        ("STEP", "", "SAVED", "METRICS", "WHY"),
        (
            (
                verdict.folder,
                _fate(verdict, retired),
                format_age(facts.saved_at, now),
                format_metrics(facts.metrics),
                (retired.why_not if retired else "") or verdict.why,
            )
            for verdict, facts, retired in rows
        ),
        right=(2,),
    )
    num_staying = sum(verdict.stays for verdict, _, _ in rows)
    num_going = len(rows) - num_staying
    if not args.yes:
        told = f"keeps {num_staying} of {count_text(len(rows), 'step')}; nothing was deleted"
        yield told + (f"; --yes deletes the other {num_going}" if num_going else "")
        return
    gone = [one for one in done.values() if not one.why_not]
    yield (
        f"deleted {count_text(len(gone), 'step')},"
        f" {count_text(sum(one.num_objects for one in gone), 'object')},"
        f" {size_text(sum(one.num_bytes for one in gone))};"
        f" {num_going - len(gone)} could not be deleted; kept {num_staying}"
    )


def _fate(verdict: Verdict, retired: Retired | None) -> str:
    if verdict.stays:
        return "stays"
    if retired is None:
        return "goes"
    return "STILL THERE" if retired.why_not else "deleted"


def _fields(verdict: Verdict, facts: StepFacts, retired: Retired | None) -> dict[str, Any]:
    fields = {
        **asdict(verdict),
        "saved_at": facts.saved_at,
        "metrics": metrics_document(facts.metrics),
        "run": facts.run,
        "layout": facts.layout,
    }
    if retired is not None:
        fields["deleted"] = {
            "num_objects": retired.num_objects,
            "num_bytes": retired.num_bytes,
            "why_not": retired.why_not or None,
        }
    return fields
