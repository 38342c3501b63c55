"""Processes on free loopback ports that end with the driver."""

import atexit
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

DIR = Path(tempfile.mkdtemp(prefix="tidegate-driver-"))
children = []
ports_in_use = set()


def stop(child):
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@atexit.register
def stop_all():
    for child in children:
        stop(child)
    shutil.rmtree(DIR, ignore_errors=True)


signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def free_port():
    """A port that no earlier call has returned."""
    while True:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        if port not in ports_in_use:
            ports_in_use.add(port)
            return port
