from __future__ import annotations

import subprocess
import sys


def test_stores_and_fakes_need_no_torch():
    script = "import sys, dcpstore.store, dcpstore.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_an_engine_is_imported_when_it_is_needed():
    """A machine without s3fs or gcsfs uses the others."""
    script = (
        "import sys; from dcpstore.store import open_store; open_store('s3://b', "
        "storage_options={'key': 'a', 'secret': 'b', 'endpoint_url': 'http://h', "
        "'client_kwargs': {'region_name': 'r'}}); "
        "sys.exit(bool({'s3fs', 'gcsfs', 'aiobotocore', 'botocore'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
