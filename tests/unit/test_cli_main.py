"""The frame around the commands: parsing, exit codes, streams, secrets, start-up."""

from __future__ import annotations

import argparse
import io
import json
import logging
import pickle
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dcpstore import errors
from dcpstore.cli import main as commands
from dcpstore.cli.connection import add_connection_arguments, read_connection
from dcpstore.cli.main import main
from dcpstore.cli.output import ExitCode, Output, exit_code_of
from dcpstore.report import Meter

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def connection(url: str, *arguments: str, side: str = ""):
    parser = argparse.ArgumentParser()
    add_connection_arguments(parser, *filter(None, [side]))
    out = Output(io.StringIO(), io.StringIO())
    return read_connection(parser.parse_args(list(arguments)), url, out, side), out


# --- parsing and exit codes ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.CorruptError("x"), 1),
        (errors.ConfigError("x"), 2),
        (errors.NotFoundError("x"), 3),
        (errors.StoreError("x", denied=True), 4),
        (errors.StoreError("x"), 5),
        (errors.AlreadyExistsError("x"), 6),
        (errors.ConflictError("x"), 6),
        (errors.IncompatibleError("x"), 7),
        (errors.CommitUnknownError("x"), 8),
        (PermissionError(13, "x"), 5),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError(), 70),
        (errors.RankFailures("write", {0: "x"}), 5),
    ],
)
def test_every_kind_of_error_has_its_exit_code(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def test_failures_of_ranks_end_with_the_code_of_their_cause() -> None:
    cause = pickle.dumps(errors.NotFoundError("gone"))
    assert exit_code_of(errors.RankFailures("read", {1: "gone"}, pickled={1: cause})) == 3


def test_every_exit_code_is_explained_in_help_and_documentation(cli) -> None:
    code, out, _ = cli("--help")
    assert code == 0
    rows = dict(re.findall(r"^\| (\d+) \| (.+?) \|$", DOCS.read_text(), re.MULTILINE))
    for one in ExitCode:
        assert rows[str(int(one))] == one.meaning
        assert one.meaning in out


@pytest.mark.parametrize("name", commands.SUMMARIES)
def test_every_command_has_help_with_examples_of_itself(cli, name: str) -> None:
    code, out, err = cli(name, "--help")
    assert (code, err) == (0, "")
    examples = out.split("examples:")[1].split("exit codes:")[0]
    assert f"dcpstore {name}" in examples
    assert "--json" in out


@pytest.mark.parametrize("name", commands.SUMMARIES)
def test_every_command_is_documented(name: str) -> None:
    assert f"`dcpstore {name}" in DOCS.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["ls"], "required: RUN_URL"),
        (["ls", "x", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["ls", "x", "--js"], "unrecognized arguments: --js"),
        (["ls", "s3:/one-slash"], "is not a URL"),
        (["ls", "x", "--retry-seconds", "-1"], "invalid"),
        (["ls", "x", "--profile", "p"], "profile"),
    ],
)
def test_a_wrong_command_line_ends_with_2_and_one_line(cli, arguments, words: str) -> None:
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_no_command_prints_help_on_standard_error(cli) -> None:
    code, out, err = cli()
    assert (code, out) == (2, "")
    assert "usage: dcpstore" in err


def test_the_version_is_that_of_the_package(cli) -> None:
    from dcpstore import __version__

    assert cli("--version") == (0, f"dcpstore {__version__}\n", "")


def test_options_of_all_commands_may_stand_before_the_name(cli, tmp_path: Path) -> None:
    code, _, err = cli("--json", "ls", tmp_path)
    assert code == 3
    assert json.loads(err)["exit_code"] == 3


def test_errors_are_json_where_the_result_would_be(cli) -> None:
    code, out, err = cli("ls", "--nonsense", "--json")
    document = json.loads(err)
    assert (code, out) == (2, "")
    assert document["schema"] == "dcpstore.error/1"
    assert document["type"] == "ConfigError"


def test_debug_adds_the_traceback(cli, tmp_path: Path) -> None:
    _, _, plain = cli("ls", tmp_path)
    _, _, full = cli("ls", tmp_path, "--debug")
    assert "Traceback" not in plain
    assert "Traceback" in full
    assert full.endswith(plain)


# --- a command that ends badly ------------------------------------------------------------


class Broken:
    """A command whose `run` raises."""

    DESCRIPTION = EXAMPLES = "x"

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("url", nargs="?")

    def run(self, args: argparse.Namespace, out: Output) -> ExitCode:
        raise self.error


def end(error: BaseException, *arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = main(["ls", *arguments], stdout=out, stderr=err, load=lambda name: Broken(error))
    return code, out.getvalue(), err.getvalue()


def test_ctrl_c_ends_with_130_and_no_traceback() -> None:
    assert end(KeyboardInterrupt()) == (130, "", "dcpstore: interrupted\n")


def test_a_bug_is_called_one_and_ends_with_70() -> None:
    code, out, err = end(ZeroDivisionError("division by zero"))
    assert (code, out) == (70, "")
    assert "a bug in dcpstore: ZeroDivisionError: division by zero" in err


def test_a_reader_that_went_away_is_no_error() -> None:
    assert end(BrokenPipeError()) == (141, "", "")


def test_an_error_tells_scripts_which_bytes_it_is_about() -> None:
    error = errors.CorruptError("bad", key="__0_0.distcp", start=1, end=9, fqn="w")
    document = json.loads(end(error, "--json")[2])
    assert document == {
        "schema": "dcpstore.error/1",
        "error": "bad",
        "type": "CorruptError",
        "exit_code": 1,
        "key": "__0_0.distcp",
        "start": 1,
        "end": 9,
        "fqn": "w",
    }


# --- connection ---------------------------------------------------------------------------


def test_options_take_json_values_and_text() -> None:
    found, _ = connection(
        "s3://b",
        "--storage-option=key=123",
        "--storage-option=use_ssl=false",
        '--storage-option=client_kwargs={"region_name": "eu-west-1"}',
        "--storage-option=endpoint=a=b",
    )
    assert found.storage_options == {
        "key": "123",  # an access key, and no number
        "use_ssl": False,
        "client_kwargs": {"region_name": "eu-west-1"},
        "endpoint": "a=b",
    }


def test_shorthands_become_storage_options() -> None:
    found, _ = connection("s3://b", "--endpoint-url=http://h:1", "--profile=p", "--anon")
    assert found.storage_options == {"endpoint_url": "http://h:1", "profile": "p", "anon": True}


def test_no_credentials_has_another_name_for_google() -> None:
    assert connection("gs://b", "--anon")[0].storage_options == {"token": "anon"}


def test_options_of_one_side_win_over_the_common_ones() -> None:
    found, _ = connection("s3://b", "--profile=p", "--source-profile=q", "--anon", side="source")
    assert found.storage_options == {"profile": "q", "anon": True}


def test_a_file_of_options_keeps_secrets_off_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    path.write_text('{"key": "AKIAEXAMPLE", "secret": "from-a-file"}')
    found, _ = connection("s3://b", f"--storage-option=@{path}")
    assert found.storage_options["secret"] == "from-a-file"


@pytest.mark.parametrize("text", ["secretwithoutequals", "=value", "@/nowhere.json"])
def test_an_option_without_a_name_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(errors.ConfigError, match="--storage-option") as caught:
        connection("s3://b", f"--storage-option={text}")
    assert "secretwithoutequals" not in str(caught.value)


def test_the_retry_time_reaches_the_reader() -> None:
    found, _ = connection("s3://b", "--retry-seconds=7")
    assert found.config.retry_deadline_s == 7


def test_secrets_given_as_options_are_blanked_out_of_everything_said() -> None:
    found, out = connection(
        "s3://b",
        "--storage-option=secret=hunter2hunter2",
        '--storage-option=client_kwargs={"aws_session_token": "sesame-sesame"}',
    )
    out.note("with hunter2hunter2")
    out.error(errors.StoreError("refused sesame-sesame"), ExitCode.STORE_FAILED)
    out.traceback("secret='hunter2hunter2'")
    said = out.stderr.getvalue()
    assert "***" in said
    assert "hunter2" not in said
    assert "sesame" not in said
    assert "hunter2" not in repr(found)


def test_a_mistyped_option_does_not_show_its_value(cli) -> None:
    code, _, err = cli("ls", "x", "--storage-optoin", "secret=hunter2hunter2")
    assert code == 2
    assert "hunter2" not in err


# --- streams ------------------------------------------------------------------------------


def test_a_result_is_one_document_or_lines_and_notes_stay_off_it() -> None:
    for as_json in (False, True):
        out = Output(io.StringIO(), io.StringIO(), as_json=as_json)
        out.note("on the way")
        out.result("dcpstore.x/1", {"a": 1}, ["line"])
        text = out.stdout.getvalue()
        if as_json:
            assert json.loads(text) == {"schema": "dcpstore.x/1", "a": 1}
            assert out.stderr.getvalue() == ""
        else:
            assert text == "line\n"
            assert out.stderr.getvalue() == "on the way\n"


def test_warnings_of_the_library_are_the_commands_own() -> None:
    class Warns(Broken):
        def run(self, args: argparse.Namespace, out: Output) -> ExitCode:
            logging.getLogger("dcpstore.write.commit").warning("left %d", 3)
            return ExitCode.OK

    for flags, said in (([], "warning: left 3\n"), (["--json"], '{"warning": "left 3"}\n')):
        err = io.StringIO()
        broken = Warns(RuntimeError())
        assert (
            main(["ls", *flags], stdout=io.StringIO(), stderr=err, load=lambda _, b=broken: b) == 0
        )
        assert err.getvalue() == said


def test_progress_is_a_bar_on_a_terminal() -> None:
    out = Output(io.StringIO(), Terminal())
    with out.progress("verify") as report:
        meter = Meter("verify", report)
        meter.expect(2048)
        meter.advance(1024)
    assert "\rverify: " in out.stderr.getvalue()
    assert "\n" not in out.stderr.getvalue()


def test_progress_is_a_line_now_and_then_elsewhere() -> None:
    now = iter([0.0, 1.0, 11.0, 12.0, 30.0])
    out = Output(io.StringIO(), io.StringIO(), clock=lambda: next(now))
    with out.progress("verify") as report:
        meter = Meter("verify", report)
        meter.expect(4 << 20)  # at 1 s: too early
        for _ in range(3):
            meter.advance(1 << 20)
    assert out.stderr.getvalue().splitlines() == [
        "verify: 1.0 MiB of 4.0 MiB (25%)",
        "verify: 3.0 MiB of 4.0 MiB (75%)",
    ]


@pytest.mark.parametrize("more", [{"quiet": True}, {"as_json": True}])
def test_no_progress_where_nobody_wants_it(more) -> None:
    out = Output(io.StringIO(), Terminal(), **more)
    with out.progress("verify") as report:
        Meter("verify", report).expect(1)
    assert out.stderr.getvalue() == ""


# --- processes ----------------------------------------------------------------------------


def test_what_starts_fast_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / ".metadata").write_bytes(b"x")
    script = (
        "import sys; from dcpstore.cli.main import main; "
        f"assert main(['--help']) == 0; assert 'fsspec' not in sys.modules; "
        f"assert main(['ls', {str(tmp_path)!r}]) == 0; "
        "assert main(['show', '--help']) == 0; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)


def test_a_pipe_that_closes_early_leaves_no_complaint(tmp_path: Path) -> None:
    for number in range(3000):
        folder = tmp_path / f"step-{number}"
        folder.mkdir()
        (folder / ".metadata").write_bytes(b"x")
    command = [sys.executable, "-m", "dcpstore", "ls", str(tmp_path), "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"CHECKPOINT")
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_ctrl_c_ends_a_process_that_waits_inside_a_foreign_call_for_a_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        options = ["--storage-option=key=a", "--storage-option=secret=b", "--endpoint-url", url]
        command = [sys.executable, "-m", "dcpstore", "ls", "s3://bucket/run", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            server.settimeout(60)
            connection, _ = server.accept()
            with connection:
                assert connection.recv(1)  # it has asked and waits for the answer
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"dcpstore: interrupted\n")


SIGNALLED = """
import os, signal, sys, time
from dcpstore.cli.main import answer_signals

answer_signals("message", grace_s=0.01)
try:
    os.kill(os.getpid(), signal.SIGTERM)
except SystemExit as error:
    print(error.code, flush=True)
    if "twice" in sys.argv:
        while True:
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            except SystemExit:
                print("unwinding", flush=True)
    raise
"""


@pytest.mark.parametrize("times", ["once", "twice"])
def test_sigterm_unwinds_first_and_ends_the_process_when_it_comes_again(times: str) -> None:
    command = [sys.executable, "-c", SIGNALLED, times]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 143
    assert ended.stdout.startswith("143\n")
    assert ended.stderr == ""
