"""``dcpstore retain``, ``pin`` and ``unpin``, and what ``ls --long`` shows of a run."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcpstore
from dcpstore.format.seal import Facts
from dcpstore.manager.run import Run
from dcpstore.testing import Fault, MotoServer

LOSSES = {100: 0.5, 200: 0.25, 300: math.nan, 400: 1.0}


def save(run: Path, step: int, of: str | None = None, **metrics: float) -> None:
    state = {"weight": torch.full((4,), float(step))}
    facts = Facts(step, of)
    dcpstore.save(state, run / f"step-{step}", metrics=metrics, facts=facts)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, which no test changes."""
    run = tmp_path_factory.mktemp("made") / "run"
    for step, loss in LOSSES.items():
        save(run, step, loss=loss)
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A run of four steps."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def steps_in(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir() if path.name.startswith("step-"))


def decided(cli, run: Path, *arguments: str) -> dict[int, dict]:
    code, out, err = cli("retain", run, *arguments, "--json")
    assert (code, err) == (0, "")
    return {one["step"]: one for one in json.loads(out)["steps"]}


def staying(cli, run: Path, *arguments: str) -> list[int]:
    return sorted(n for n, one in decided(cli, run, *arguments).items() if one["stays"])


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--latest", "2"], [300, 400]),
        (["--every", "200"], [200, 400]),
        (["--every-seconds", "86400"], [100, 400]),
        (["--best", "1:loss:min"], [200, 400]),
        (["--best", "2:loss:max"], [100, 400]),
        (["--step", "100", "--step", "300"], [100, 300, 400]),
        (["--latest", "1", "--step", "100", "--best", "1:loss:min"], [100, 200, 400]),
    ],
)
def test_each_option_is_a_policy_and_any_of_them_keeps_a_step(cli, run, arguments, left) -> None:
    assert staying(cli, run, *arguments) == left
    assert steps_in(run) == ["step-100", "step-200", "step-300", "step-400"]


def test_people_see_what_stays_what_goes_and_why(cli, run: Path) -> None:
    code, out, err = cli("retain", run, "--best", "1:loss:min")
    rows = [line.split() for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert rows[0] == ["STEP", "SAVED", "METRICS", "WHY"]
    assert [(row[0], row[1]) for row in rows[1:5]] == [
        ("step-400", "stays"),
        ("step-300", "goes"),
        ("step-200", "stays"),
        ("step-100", "goes"),
    ]
    assert rows[2][-5:] == ["loss=nan", "no", "policy", "keeps", "it"]
    assert "loss=0.25  among the best 1 by loss: 0.25" in out
    assert out.endswith("keeps 2 of 4 steps; nothing was deleted; --yes deletes the other 2\n")


def test_a_document_says_all_of_it_in_plain_json(cli, run: Path) -> None:
    out = cli("retain", run, "--latest", "1", "--json")[1]
    document = json.loads(out, parse_constant=pytest.fail)
    assert (document["schema"], document["dry_run"]) == ("dcpstore.retain/1", True)
    assert document["url"] == run.as_uri()
    one = document["steps"][1]
    assert one.pop("saved_at").endswith("Z")
    assert one == {
        "step": 300,
        "folder": "step-300",
        "stays": False,
        "why": "no policy keeps it",
        "metrics": {"loss": "nan"},
        "run": None,
        "layout": "dcpstore",
    }


def test_yes_deletes_what_goes_and_says_how_much(cli, run: Path) -> None:
    left = [path for path in (run / "step-100").iterdir() if path.name.startswith(".metadata")]
    assert left
    code, out, err = cli("retain", run, "--latest", "2", "--yes")
    assert (code, err) == (0, "")
    assert [line.split()[1] for line in out.splitlines()[1:5]] == ["stays"] * 2 + ["deleted"] * 2
    assert "deleted 2 steps, " in out.splitlines()[-1]
    assert out.endswith("0 could not be deleted; kept 2\n")
    assert not [path for path in run.glob("step-[12]00/*") if path.is_file()]
    assert staying(cli, run, "--latest", "9") == [300, 400]


def test_the_document_of_a_deletion_tells_the_objects(cli, run: Path) -> None:
    steps = decided(cli, run, "--latest", "3", "--yes")
    assert steps[100]["deleted"]["why_not"] is None
    assert steps[100]["deleted"]["num_objects"] >= 1
    assert "deleted" not in steps[400]


def test_what_the_store_refuses_to_delete_is_told_and_ends_with_a_finding(
    cli, s3_server: MotoServer
) -> None:
    client, url = s3_server.create_bucket("refusing"), "s3://refusing/run"
    options = s3_server.storage_options()
    for step in (1, 2):
        dcpstore.save({"step": step}, f"{url}/step-{step}", storage_options=options)
    before = client.keys("run/step-")
    for operation in ("DeleteObject", "DeleteObjects"):
        s3_server.add_fault(Fault(operation, status=403, code="AccessDenied", times=-1))
    given = [f"--storage-option={name}={json.dumps(value)}" for name, value in options.items()]
    code, out, err = cli("retain", url, "--latest", "1", "--yes", *given)
    assert (code, "STILL THERE" in out) == (1, True)
    assert "warning: s3://refusing/run/step-1 stays: step-1/.metadata" in err
    assert client.keys("run/step-") == before


def test_what_is_saved_again_meanwhile_is_still_there(cli, run: Path) -> None:
    (run / "step-100" / "__0_0.0123456789abcdef.distcp").write_bytes(b"of a save under way")
    code, out, err = cli("retain", run, "--latest", "3", "--yes")
    assert code == 1
    assert "a save may be under way there" in out
    assert "1 could not be deleted" in out
    assert "stays: a save may be under way" in err
    assert (run / "step-100" / ".metadata").exists()


def test_steps_of_others_go_only_if_told(cli, run: Path) -> None:
    save(run, 500, of="f" * 16)
    save(run, 600)
    assert 500 in staying(cli, run, "--latest", "1")
    assert staying(cli, run, "--latest", "1", "--others") == [600]
    assert cli("retain", run, "--latest", "1", "--others", "--yes")[0] == 0
    assert staying(cli, run, "--latest", "1") == [600]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_step_of_stock_dcp_goes_only_if_told(cli, run: Path) -> None:
    state = {"weight": torch.ones(4)}
    dcp.save(state, checkpoint_id=run / "step-150", no_dist=True)
    assert staying(cli, run, "--latest", "2") == [150, 300, 400]
    assert cli("retain", run, "--latest", "2", "--others", "--yes")[0] == 0
    assert staying(cli, run, "--latest", "9") == [300, 400]
    assert not list((run / "step-150").glob("*"))


def test_metrics_that_were_reported_later_count(cli, run: Path) -> None:
    with Run(run) as at:
        at.report(300, {"loss": 0.125, "accuracy": 0.75})
    steps = decided(cli, run, "--best", "1:loss:min")
    assert steps[300]["metrics"] == {"loss": 0.125, "accuracy": 0.75}
    assert steps[300]["stays"]
    assert not steps[200]["stays"]


# --- pins ---------------------------------------------------------------------------------


def test_a_pinned_step_stays_until_it_is_unpinned(cli, run: Path) -> None:
    code, out, _ = cli("pin", run, "100")
    assert (code, out) == (0, f"step 100 of {run.as_uri()} is pinned\n")
    assert decided(cli, run, "--latest", "1")[100]["why"] == "pinned"
    assert cli("retain", run, "--latest", "1", "--yes")[0] == 0
    assert staying(cli, run, "--latest", "9") == [100, 400]
    code, out, _ = cli("unpin", run, "step-100", "--json")
    assert (code, json.loads(out)) == (
        0,
        {"schema": "dcpstore.pin/1", "url": run.as_uri(), "step": 100, "pinned": False},
    )
    assert staying(cli, run, "--latest", "1") == [400]


def test_pins_may_be_put_and_taken_away_twice(cli, run: Path) -> None:
    assert [cli(verb, run, "200")[0] for verb in ("pin", "pin", "unpin", "unpin")] == [0] * 4


def test_a_step_that_is_not_there_cannot_be_pinned(cli, run: Path) -> None:
    code, _, err = cli("pin", run, "150")
    assert code == 3
    assert "has no sealed step 150" in err


# --- what is asked for --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["retain", "RUN"], "needs to know what stays"),
        (["retain", "RUN", "--latest", "0"], "at least 1"),
        (["retain", "RUN", "--latest", "all"], "invalid int"),
        (["retain", "RUN", "--every-seconds", "nan"], "above 0"),
        (["retain", "RUN", "--best", "loss"], "N:METRIC:min or N:METRIC:max"),
        (["retain", "RUN", "--best", "2:loss:low"], "'min' if the lowest loss"),
        (["retain", "RUN", "--best", "2:min"], "N:METRIC:min"),
        (["pin", "RUN", "latest"], "is no step"),
        (["unpin", "RUN", "-5"], "unrecognized|required|is no step"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(cli, run: Path, arguments, words: str) -> None:
    code, out, err = cli(*(run if one == "RUN" else one for one in arguments))
    assert (code, out) == (2, "")
    assert any(one in err for one in words.split("|")), err


def test_a_metric_may_have_colons_in_its_name(cli, run: Path) -> None:
    save(run, 50, **{"eval:f1": 0.5})
    assert staying(cli, run, "--best", "1:eval:f1:max") == [50, 400]


def test_a_folder_without_steps_is_not_found(cli, tmp_path: Path) -> None:
    code, _, err = cli("retain", tmp_path, "--latest", "1")
    assert code == 3
    assert "has no sealed step" in err


# --- ls --long ----------------------------------------------------------------------------


def test_a_long_list_has_steps_metrics_and_pins(cli, run: Path) -> None:
    cli("pin", run, "200")
    (run / "step-500").mkdir()
    (run / "step-500" / "__0_0.0123456789abcdef.distcp").write_bytes(b"left")
    code, out, _ = cli("ls", run, "--long")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert rows[0][-3:] == ["STEP", "METRICS", "PINNED"]
    assert [row[row.index(row[0].removeprefix("step-"), 1) :] for row in rows[1:]] == [
        ["100", "loss=0.5"],
        ["200", "loss=0.25", "yes"],
        ["300", "loss=nan"],
        ["400", "loss=1"],
        ["500", "-"],
    ]


def test_a_long_document_has_metrics_and_pins(cli, run: Path) -> None:
    cli("pin", run, "300")
    out = cli("ls", run, "-l", "--json")[1]
    document = json.loads(out, parse_constant=pytest.fail)
    found = {one["step"]: (one["metrics"], one["pinned"]) for one in document["checkpoints"]}
    assert found[200] == ({"loss": 0.25}, False)
    assert found[300] == ({"loss": "nan"}, True)
    assert "metrics" not in json.loads(cli("ls", run, "--json")[1])["checkpoints"][0]


def test_a_long_list_of_one_checkpoint_knows_no_run(cli, run: Path) -> None:
    code, out, _ = cli("ls", run / "step-100", "--long")
    assert code == 0
    assert out.splitlines()[1].split()[-2:] == ["100", "-"]
