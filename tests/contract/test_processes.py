"""Stores across forks and in spawned processes. Each scenario is a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Runs in a fresh interpreter: a fork of the test process would take its threads' locks along.
FORK = """
import os, sys
from dcpstore.errors import ConfigError
from dcpstore.store import RetryPolicy, open_store

url, engine, when, options = sys.argv[1], sys.argv[2], sys.argv[3], eval(sys.argv[4])
store = open_store(url, engine=engine, storage_options=options)
if when == "used":
    store.put("from-parent", b"parent")
pid = os.fork()
if pid == 0:
    code = 1
    try:
        if when == "fresh":
            store = open_store(url, engine=engine, storage_options=options)
        store.put("from-child", b"child")
        code = 0 if bytes(store.get("from-child").data) == b"child" else 3
    except ConfigError as error:
        code = 42 if "fork" in str(error) and "spawn" in str(error) else 4
    except BaseException as error:
        print(repr(error), file=sys.stderr)
    finally:
        os._exit(code)
_, status = os.waitpid(pid, 0)
store.put("after", b"parent")
assert bytes(store.get("after").data) == b"parent"
sys.exit(os.waitstatus_to_exitcode(status))
"""

SPAWN = """
import multiprocessing as mp, sys
from dcpstore.store import open_store

def work(store, key):
    store.put(key, b"child:" + bytes(store.get("from-parent").data))

if __name__ == "__main__":
    url, engine, method, options = sys.argv[1], sys.argv[2], sys.argv[3], eval(sys.argv[4])
    store = open_store(url, engine=engine, storage_options=options)
    store.put("from-parent", b"parent")
    child = mp.get_context(method).Process(target=work, args=(store, "from-child"))
    child.start()
    child.join(60)
    assert child.exitcode == 0, child.exitcode
    assert bytes(store.get("from-child").data) == b"child:parent"
"""


def run(script, *arguments, path):
    path.write_text(script)
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(path), *arguments],
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def place(request, s3_server, bucket, tmp_path):
    if request.param == "s3":
        return f"s3://{bucket}/{tmp_path.name}", repr(s3_server.storage_options())
    return str(tmp_path / "store"), "None"


both = pytest.mark.parametrize("place", ["s3", "local"], indirect=True, ids=["s3", "local"])


@both
def test_obstore_refuses_in_a_forked_child(place, tmp_path):
    done = run(FORK, place[0], "obstore", "used", place[1], path=tmp_path / "script.py")
    assert done.returncode == 42, done.stderr


@both
def test_obstore_refuses_where_only_the_parent_used_it(place, tmp_path):
    script = FORK.replace('if when == "used":', 'if when == "fresh":')
    done = run(script, place[0], "obstore", "fresh", place[1], path=tmp_path / "script.py")
    assert done.returncode == 42, done.stderr


@both
@pytest.mark.parametrize("when", ["unused", "fresh"])
def test_obstore_works_in_a_child_forked_before_its_first_use(place, when, tmp_path):
    done = run(FORK, place[0], "obstore", when, place[1], path=tmp_path / "script.py")
    assert done.returncode == 0, done.stderr


@both
@pytest.mark.parametrize("when", ["used", "unused", "fresh"])
def test_fsspec_works_in_a_forked_child(place, when, tmp_path):
    done = run(FORK, place[0], "fsspec", when, place[1], path=tmp_path / "script.py")
    assert done.returncode == 0, done.stderr


@both
@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_store_travels_to_a_new_process(place, engine, method, tmp_path):
    if method == "forkserver" and engine == "fsspec":
        pytest.skip("the same path as spawn")
    done = run(SPAWN, place[0], engine, method, place[1], path=tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
