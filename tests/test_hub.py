"""Models on the Hugging Face Hub: downloads from a stand-in server, uploads to a stand-in API."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import factories
import numpy as np
import pytest
import torch

import otad
from otad.errors import InputError, MissingExtraError

hub = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Server(BaseHTTPRequestHandler):
    """The part of the Hub that a download uses, for one repository "user/model"."""

    def __init__(self, *args: Any, folder: Path, asked: list[str]) -> None:
        self.folder, self.asked = folder, asked
        super().__init__(*args)

    def do_GET(self) -> None:
        api, file = "/api/models/user/model/", f"/user/model/resolve/{COMMIT}/"
        if self.path.removeprefix(f"{api}revision/") in ("main", "v1", COMMIT):
            about = {"id": "user/model", "sha": COMMIT, "private": False}
            self.answer(json.dumps(about).encode(), "application/json")
        elif self.path.startswith(f"{api}tree/{COMMIT}?"):
            known = {"type": "file", "size": 0, "oid": COMMIT}
            names = [known | {"path": path.name} for path in sorted(self.folder.iterdir())]
            self.answer(json.dumps(names).encode(), "application/json")
        elif self.path.startswith(file):
            name = self.path.removeprefix(file)
            self.asked.append(name)
            self.answer((self.folder / name).read_bytes(), "application/octet-stream")
        else:
            self.send_error(404)

    do_HEAD = do_GET  # noqa: N815

    def answer(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def asked(tmp_path, monkeypatch) -> Iterator[list[str]]:
    """Names of the files that were downloaded from the folder "remote"."""
    names: list[str] = []
    (tmp_path / "remote").mkdir()
    made = partial(Server, folder=tmp_path / "remote", asked=names)
    with ThreadingHTTPServer(("127.0.0.1", 0), made) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        download = partial(
            hub.snapshot_download,
            endpoint=f"http://127.0.0.1:{server.server_port}",
            cache_dir=tmp_path / "cache",
        )
        monkeypatch.setattr(hub, "snapshot_download", download)
        yield names
        server.shutdown()
        thread.join()


def test_a_model_is_downloaded_without_anything_that_could_hold_code(tmp_path, asked) -> None:
    model, remote = factories.model(), tmp_path / "remote"
    model.save(remote)
    (remote / "run.py").write_text("raise SystemExit")
    (remote / "weights.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    x = factories.queries(model, 3)
    for revision in (None, "v1", COMMIT):
        found = otad.from_pretrained("user/model", revision=revision)
        assert torch.equal(found(x), model(x))
    files = {path.name for path in remote.iterdir()} - {".lock", "README.md", "run.py"}
    assert {*asked} == files - {"weights.pkl"}
    assert len(asked) <= 2 * len({*asked}), "the second revision is in the cache"
    with pytest.raises(InputError, match="user/model: expected a repository to download from"):
        otad.from_pretrained("user/model", revision="v2")
    with pytest.raises(InputError, match="user/other: expected a repository to download from"):
        otad.from_pretrained("user/other")
    for name in ("model", "../user/model", "https://host/model", tmp_path / "none"):
        with pytest.raises(InputError, match="name: expected an existing folder, or a repository"):
            otad.from_pretrained(name)
    with pytest.raises(InputError, match="revision: expected None"):
        otad.from_pretrained(remote, revision=COMMIT)


def test_a_changed_or_linked_file_is_refused(tmp_path, asked) -> None:
    remote = tmp_path / "remote"
    factories.model().save(remote)
    bank = next(remote.glob("bank-*"))
    *same, last = bank.read_bytes()
    bank.write_bytes(bytes([*same, last ^ 1]))
    with pytest.raises(InputError, match="checksum"):
        otad.from_pretrained("user/model")
    cached = next((tmp_path / "cache").rglob(bank.name))
    cached.unlink()
    cached.symlink_to(bank)  # outside the cache of this repository
    with pytest.raises(InputError, match="regular file inside the folder"):
        otad.from_pretrained("user/model")


class Api:
    """A stand-in for `HfApi`, which stores what is uploaded."""

    def __init__(self, stored: Path, calls: list[Any], public: bool, token: str | None) -> None:
        self.stored, self.calls, self.public = stored, calls, public
        calls.append(token)

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        self.calls.append((repo_id, private, exist_ok))

    def model_info(self, repo_id: str) -> SimpleNamespace:
        return SimpleNamespace(private=not self.public)

    def create_branch(self, repo_id: str, *, branch: str, exist_ok: bool) -> None:
        self.calls.append(branch)

    def upload_folder(self, *, folder_path: Path, **options: Any) -> SimpleNamespace:
        patterns = {name: options[f"{name}_patterns"] for name in ("allow", "delete")}
        names = [path.name for path in folder_path.iterdir()]
        for old in [old for one in patterns["delete"] for old in self.stored.glob(one)]:
            old.unlink()
        for name in hub.utils.filter_repo_objects(names, allow_patterns=patterns["allow"]):
            (self.stored / name).write_bytes((folder_path / name).read_bytes())
        return SimpleNamespace(oid=COMMIT)


def test_an_estimator_is_uploaded_and_comes_back(tmp_path, asked, monkeypatch) -> None:
    calls: list[Any] = []
    remote = tmp_path / "remote"
    monkeypatch.setattr(hub, "HfApi", partial(Api, remote, calls, False))
    factories.model().save(remote)  # is replaced
    generator = np.random.default_rng(0)
    x = generator.random((40, 3))
    clf = otad.OTADClassifier(epochs=1, n_neighbors=3).fit(
        x, np.array(["a", "b"])[(x[:, 0] > 0.5) * 1]
    )
    pushed = otad.push_to_hub(clf, "user/model", token="t", revision="v1")
    assert pushed == COMMIT
    assert calls == ["t", ("user/model", True, True), "v1"]
    found = otad.from_pretrained("user/model", revision=pushed)
    assert isinstance(found, otad.OTADClassifier)
    assert (found.predict(x) == clf.predict(x)).all()
    assert len([*remote.glob("bank-*")]) == 1
    assert "# model\n" in (remote / "README.md").read_text()
    local = otad.from_pretrained(remote)
    assert (local.predict(x) == clf.predict(x)).all()


def test_training_points_are_not_published_by_accident(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hub, "HfApi", partial(Api, tmp_path, [], True))
    with pytest.raises(InputError, match="private: expected False for user/model"):
        otad.push_to_hub(factories.model(), "user/model")
    assert not [*tmp_path.iterdir()]
    otad.push_to_hub(factories.model(), "user/model", private=False)
    assert (tmp_path / "card.json").exists()


def test_without_the_extra(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"otad\[hub\]"):
        otad.from_pretrained("user/model")
    factories.model().save(tmp_path / "here")
    assert otad.from_pretrained(tmp_path / "here").n_neighbors == 6
