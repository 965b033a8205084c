"""A small Hugging Face hub on 127.0.0.1: enough of its protocol to create, push to and download repositories.

Speaks what huggingface_hub 0.36 and 2.x ask: whoami-v2, repos/create, validate-yaml, repository info, tree,
auth-check, preupload, commit (NDJSON, with plain and with LFS files), branches, the LFS batch and its uploads, resolve.
Everything is in memory. Left out: pull requests, the Xet protocol, spaces, and whatever else the real one checks.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml


@dataclass
class Repository:
    """Its files at every commit, and which commit each branch is at."""

    kind: str
    name: str
    private: bool = False
    gated: bool = False
    writers: set[str] = field(default_factory=set)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], message: str, branch: str = "main") -> str:
        """Make a commit with exactly these files; returns its hash."""
        digest = hashlib.sha1(repr((self.name, len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[digest] = files
        self.messages.append(message)
        self.branches[branch] = digest
        return digest

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """The files of a branch or commit."""
        return self.commits[self.branches.get(revision, revision)]


class Hub:
    """The state of the server, to be arranged and looked at by tests.

    Attributes:
        users: token -> what whoami-v2 answers to it; see `user`.
        repositories: (kind, name) -> repository; kinds are "model" and "dataset".
        failures: (method, regular expression for the path) -> (status, headers) to answer instead.
        requests: method and path of every request, in order.
        lfs_suffixes: files with these endings are uploaded by the LFS protocol.
        knows_write_check: whether auth-check/write is there.
    """

    def __init__(self) -> None:
        self.users: dict[str, dict[str, Any]] = {}
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.failures: dict[tuple[str, str], tuple[int, dict[str, str]]] = {}
        self.requests: list[tuple[str, str]] = []
        self.lfs_suffixes: tuple[str, ...] = ()
        self.lfs_objects: dict[str, bytes] = {}
        self.knows_write_check = True
        self.url = ""

    def user(self, token: str, name: str, *, role: str = "write", orgs: dict[str, str] | None = None) -> dict[str, Any]:
        """Add a user and a token of theirs; orgs: name -> role there."""
        self.users[token] = {
            "type": "user",
            "name": name,
            "orgs": [{"type": "org", "name": org, "roleInOrg": part} for org, part in (orgs or {}).items()],
            "auth": {"type": "access_token", "accessToken": {"displayName": "laptop", "role": role}},
        }
        return self.users[token]

    def add(self, name: str, *, kind: str = "model", files: dict[str, bytes] | None = None, **state: Any) -> Repository:
        """Add a repository, as the hub creates it (with .gitattributes), then the given files."""
        repository = Repository(kind, name, **state)
        repository.commit({".gitattributes": b"*.bin filter=lfs\n"}, "initial commit")
        if files:
            repository.commit({**repository.files(), **files}, "files")
        self.repositories[kind, name] = repository
        return repository

    def asked(self, pattern: str) -> list[tuple[str, str]]:
        """The requests so far whose ``METHOD path`` matches."""
        return [request for request in self.requests if re.search(pattern, " ".join(request))]


@contextmanager
def serve() -> Iterator[Hub]:
    """A running hub, stopped at the end."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message


_REPOSITORY = r"(?P<name>[^/]+/[^/]+)"
_API = rf"/api/(?P<kind>model|dataset)s/{_REPOSITORY}"
_FILES = rf"/(?P<datasets>datasets/)?{_REPOSITORY}"
_ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("GET", rf"{_API}", "info"),
    ("GET", rf"{_API}/revision/(?P<revision>[^/]+)", "info"),
    ("GET", rf"{_API}/tree/(?P<revision>[^/]+)", "tree"),
    ("GET", rf"{_API}/auth-check/write", "check_write"),
    ("POST", rf"{_API}/branch/(?P<branch>[^/]+)", "make_branch"),
    ("POST", rf"{_API}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"{_API}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"{_FILES}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]+)", "lfs_put"),
    ("HEAD", rf"{_FILES}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    ("GET", rf"{_FILES}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    timeout = 20  # a connection that says nothing is closed

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PUT = do_HEAD = do_GET

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append((self.command, unquote(path)))
        try:
            for (method, pattern), (status, headers) in self.hub.failures.items():
                if method == self.command and re.search(pattern, path):
                    self._send(status, b'{"error": "arranged by the test"}', headers)
                    return
            for method, pattern, action in _ROUTES:
                found = re.fullmatch(pattern, path)
                if method == self.command and found:
                    arguments = {key: unquote(value) for key, value in found.groupdict().items() if value}
                    getattr(self, f"_{action}")(**arguments)
                    return
            self._send(404, b'{"error": "no such page"}')
        except _Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            answer = json.dumps({"error": refused.message}).encode()
            self._send(refused.status, answer, {key: value for key, value in headers.items() if value})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, content: Any, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode())

    # --- who asks, and what they may ------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any] | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.users:
            raise _Refused(401, message="Invalid credentials in Authorization header")
        return self.hub.users.get(token)

    def _may_write_under(self, owner: str) -> bool:
        user = self._identity()
        if user is None or user["auth"]["accessToken"]["role"] == "read":
            return False
        organisations = {org["name"]: org["roleInOrg"] for org in user["orgs"]}
        return owner == user["name"] or organisations.get(owner) in ("admin", "write", "contributor")

    def _repository(self, name: str, kind: str = "model", datasets: str = "", *, write: bool = False) -> Repository:
        user = self._identity()
        repository = self.hub.repositories.get(("dataset" if datasets else kind, name))
        member = repository is not None and (
            self._may_write_under(name.split("/")[0]) or (user is not None and user["name"] in repository.writers)
        )
        if repository is None or (repository.private and not member):
            raise _Refused(404 if user else 401, "RepoNotFound", "Repository not found")
        if write and not member:
            raise _Refused(403, message="You don't have the required permissions to perform this action")
        return repository

    def _at(self, repository: Repository, revision: str) -> tuple[str, dict[str, bytes]]:
        digest = repository.branches.get(revision, revision)
        if digest not in repository.commits:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return digest, repository.commits[digest]

    # --- actions --------------------------------------------------------------------------------------------------

    def _whoami(self) -> None:
        user = self._identity()
        if user is None:
            raise _Refused(401, message="Invalid username or password.")
        self._json(user)

    def _create(self) -> None:
        asked = json.loads(self.body)
        user = self._identity()
        owner = asked["organization"] or (user or {}).get("name", "")
        name, kind = f"{owner}/{asked['name']}", asked.get("type", "model")
        if not self._may_write_under(owner):
            raise _Refused(403, message=f"You don't have the rights to create a {kind} under the namespace {owner}")
        if (kind, name) in self.hub.repositories:
            raise _Refused(409, message="You already created this model repo")
        assert asked.get("private") in (None, True, False)
        private = asked.get("private") is True or asked.get("visibility") == "private"
        self.hub.add(name, kind=kind, private=private)
        self._json({"url": f"{self.hub.url}/{name}", "name": name})

    def _validate_yaml(self) -> None:
        content = json.loads(self.body)["content"]
        found = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        try:
            head = yaml.safe_load(found[1]) if found else None
            problem = None if isinstance(head, dict) else "empty or missing yaml metadata"
        except yaml.YAMLError as error:
            problem = str(error)
        errors = [] if problem is None else [{"message": problem}]
        self._json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def _info(self, name: str, kind: str, revision: str = "main") -> None:
        repository = self._repository(name, kind)
        digest, files = self._at(repository, revision)
        self._json(
            {
                "id": name,
                "modelId": name,
                "sha": digest,
                "private": repository.private,
                "gated": "manual" if repository.gated else False,
                "siblings": [{"rfilename": path} for path in sorted(files)],
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
        )

    def _tree(self, name: str, kind: str, revision: str) -> None:
        assert parse_qs(urlsplit(self.path).query).get("recursive") in (["True"], ["true"])
        _, files = self._at(self._repository(name, kind), revision)
        self._json(
            [
                {"type": "file", "path": path, "size": len(content), "oid": _blob_id(content)}
                for path, content in sorted(files.items())
            ]
        )

    def _check_write(self, name: str, kind: str) -> None:
        if not self.hub.knows_write_check:
            self._send(404, b'{"error": "no such page"}')
            return
        self._repository(name, kind, write=True)
        self._send(200, b"OK", {"Content-Type": "text/plain"})

    def _make_branch(self, name: str, kind: str, branch: str) -> None:
        repository = self._repository(name, kind, write=True)
        if branch in repository.branches:
            raise _Refused(409, message=f"Reference already exists: {branch}")
        repository.branches[branch] = repository.branches["main"]
        self._json({})

    def _preupload(self, name: str, kind: str, revision: str) -> None:
        _, files = self._at(self._repository(name, kind, write=True), revision)
        answer = []
        for asked in json.loads(self.body)["files"]:
            mode = "lfs" if asked["path"].endswith(self.hub.lfs_suffixes or ("\0",)) else "regular"
            known = files.get(asked["path"])
            oid = None if known is None or mode == "lfs" else _blob_id(known)
            answer.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": answer})

    def _commit(self, name: str, kind: str, revision: str) -> None:
        repository = self._repository(name, kind, write=True)
        files = dict(self._at(repository, revision)[1])
        message = ""
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                files[value["path"]] = self.hub.lfs_objects[value["oid"]]
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise AssertionError(f"unknown operation {key}")
        digest = repository.commit(files, message, revision)
        self._json({"success": True, "commitOid": digest, "commitUrl": f"{self.hub.url}/{name}/commit/{digest}"})

    def _lfs_batch(self, name: str, datasets: str = "") -> None:
        self._repository(name, datasets=datasets, write=True)
        objects = [
            {**asked, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{asked['oid']}", "header": {}}}}
            for asked in json.loads(self.body)["objects"]
        ]
        self._send(200, json.dumps({"transfer": "basic", "objects": objects}).encode())

    def _lfs_put(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.lfs_objects[oid] = self.body
        self._send(200, b"")

    def _resolve(self, name: str, revision: str, path: str, datasets: str = "") -> None:
        repository = self._repository(name, datasets=datasets)
        user = self._identity()
        if repository.gated and (user is None or user["name"] not in repository.writers):
            raise _Refused(403 if user else 401, "GatedRepo", "Access to this repository is restricted")
        digest, files = self._at(repository, revision)
        if path not in files:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        etag = f'"{_blob_id(files[path])}"'
        self._send(200, files[path], {"ETag": etag, "X-Repo-Commit": digest, "Accept-Ranges": "none"})


def _blob_id(content: bytes) -> str:
    """The id that git gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
