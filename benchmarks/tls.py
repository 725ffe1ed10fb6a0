"""TLS in front of the benchmark's server: certificates of one run, and nginx, which takes TLS off.

Python would take TLS off at several times the cost of a store, and on the cores that client and
server share here that would be measured too. nginx (Debian: ``nginx-light`` with
``libnginx-mod-stream``) passes one connection on as one, in pieces of a record, so that the
server's pace is the client's. Real handshakes are made, over loopback: their round trips take no
time here.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

import trustme

__all__ = ["Terminator", "has_terminator"]

_MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")
_CONFIG = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/error.log;
load_module {module};
events {{ worker_connections 4096; }}
stream {{
    server {{
        listen 127.0.0.1:{port} ssl backlog=512;
        ssl_certificate {folder}/server.pem;
        ssl_certificate_key {folder}/server.pem;
        ssl_protocols TLSv1.3;
        tcp_nodelay on;
        proxy_pass 127.0.0.1:{upstream_port};
        proxy_buffer_size 16k;
    }}
}}
"""


def has_terminator() -> bool:
    """Tell whether there is what takes TLS off."""
    return shutil.which("nginx", path=_PATH) is not None and _MODULE.exists()


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"


class Terminator(AbstractContextManager["Terminator"]):
    """nginx in front of a server on this machine, for as long as the context lasts.

    Args:
        upstream_port: Of the server.
    """

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port

    def __enter__(self) -> Terminator:
        self._scratch = tempfile.TemporaryDirectory(prefix="bench-tls-")
        folder = Path(self._scratch.name)
        authority = trustme.CA()
        self.authority = folder / "ca.pem"
        authority.cert_pem.write_to_path(str(self.authority))
        issued = authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        config = folder / "nginx.conf"
        config.write_text(
            _CONFIG.format(
                folder=folder, module=_MODULE, port=port, upstream_port=self._upstream_port
            )
        )
        nginx = shutil.which("nginx", path=_PATH)
        assert nginx is not None
        self._process = subprocess.Popen(
            [nginx, "-p", folder, "-c", config], stderr=subprocess.DEVNULL
        )
        self.url = f"https://127.0.0.1:{port}"
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return self
            time.sleep(0.05)
        self.__exit__()
        raise RuntimeError(f"nginx does not listen: {(folder / 'error.log').read_text()}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._scratch.cleanup()

    def trusting(self) -> dict[str, str]:
        """Return the environment in which its clients trust it, as its users would set it."""
        return {name: str(self.authority) for name in ("AWS_CA_BUNDLE", "SSL_CERT_FILE")}
