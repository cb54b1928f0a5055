"""A W&B server for tests: `openwandb`, a test tool that nothing else needs.

Its executable is looked for in the environment variable TNVP_OPENWANDB and on PATH; without it the test is skipped.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


def isolate(directory, patch):
    """Keep the user's W&B settings, keys and caches out of the tests, and the tests out of them."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        patch.delenv(name)
    for kind in ("DATA", "CACHE", "CONFIG"):
        patch.setenv(f"WANDB_{kind}_DIR", str(directory / kind.lower()))
    patch.setenv("NETRC", str(directory / "netrc"))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def fetch(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


class Server:
    """openwandb on a free loopback port. It may be stopped and started again, with what it had."""

    def __init__(self, folder: Path):
        self.executable = os.environ.get("TNVP_OPENWANDB") or shutil.which("openwandb")
        if not self.executable:
            pytest.skip("openwandb is neither in TNVP_OPENWANDB nor on PATH")
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()
        (self.key,) = set(re.findall(r"WANDB_API_KEY=(\S+)", (folder / "server.txt").read_text()))
        self.access = {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": self.key}

    def start(self):
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--data-dir", str(self.folder / "server")]
        output = self.folder / "server.txt"
        with output.open("a") as stream:
            command = [self.executable, "serve", *place]
            self.process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=self.folder)
        for _ in range(1200):
            try:
                return fetch(f"{self.url}/api/v1/viewer")
            except OSError:
                assert self.process.poll() is None, output.read_text()
                time.sleep(0.1)
        raise AssertionError(f"no answer from {self.url}")

    def stop(self):
        self.process.kill()
        self.process.wait(20)

    def sync(self, *words):
        """`wandb sync` to this server."""
        command = [sys.executable, "-m", "wandb", "sync", *words]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | self.access, timeout=200)

    def knows(self, identity):
        """Of a run: (details, {metric: values in order}, file names, artifact names)."""
        run = fetch(f"{self.url}/api/v2/runs/{identity}")["run"]
        files = fetch(f"{self.url}/api/v1/runs/{identity}/files")["files"]
        artifacts = fetch(f"{self.url}/api/v2/runs/{identity}/artifacts")["artifacts"]
        values = {key: [value for _, value in points] for key, points in self.points(identity).items()}
        return run, values, json.dumps(files), json.dumps(artifacts)

    def points(self, identity):
        """{metric: [(W&B's number of the row, value)], as often as the server was told it}."""
        metrics = fetch(f"{self.url}/api/v2/runs/{identity}/metrics")["metrics_by_key"]
        return {key: [(point["step"], point["value"]) for point in points] for key, points in metrics.items()}


# How openwandb lists runs; wandb.Api asks for it with arguments, and for fields, that openwandb's schema lacks.
LISTING = """query Runs($project: String!, $entity: String!) { project(name: $project, entityName: $entity) { runCount runs {
    edges { cursor node {
        id name displayName sweepName state config summaryMetrics tags group jobType commit createdAt heartbeatAt
        description notes historyLineCount
    } } } } }"""
LACKING = {
    "projectId": "1",
    "readOnly": False,
    "user": {"name": "admin", "username": "admin"},
    "systemMetrics": "{}",
    "historyKeys": None,
    "tags": [],
}


@contextmanager
def listing(server):
    """The URL of a gateway to the server that puts wandb.Api's question for a project's runs as the server understands it."""

    class Gateway(BaseHTTPRequestHandler):
        def do_POST(self):  # the name that http.server looks for
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            lists = "query Runs(" in question["query"]
            if lists:
                assert "...RunFragment" in question["query"], (
                    "each run's config and summary would be fetched one by one"
                )
                question["query"] = LISTING
            body = json.dumps({name: question[name] for name in ("query", "variables") if name in question}).encode()
            passed = {name: self.headers[name] for name in ("Authorization", "Content-Type") if name in self.headers}
            with urllib.request.urlopen(
                urllib.request.Request(server.url + self.path, body, passed), timeout=60
            ) as got:
                answer = json.load(got)
            if lists and (project := answer["data"]["project"]):
                project |= {"internalId": "1", "readOnly": False}
                project["runs"]["pageInfo"] = {"endCursor": None, "hasNextPage": False}
                for edge in project["runs"]["edges"]:
                    edge["node"] |= LACKING
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as gateway:
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{gateway.server_port}"
        finally:
            gateway.shutdown()
