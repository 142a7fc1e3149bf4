"""The records of this project name the commit that they were made from."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from otad.experiments.records import RunRecord

ROOT = Path(__file__).parents[2]
RECORDS = sorted({*ROOT.glob("results/*.json")} - {ROOT / "results/campaign.json"})
# These were made from the named commit with changes that were never committed.
CHANGED = {"cifar10_at_vit_l2", "imagenette_nn", "mnist_prototypes_10000"}


@cache
def digest_at(commit: str) -> str:
    """The digest of `otad.experiments.records.code_fingerprint`, of the source of a commit."""
    command = ["git", "archive", f"{commit}:src/otad"]
    packed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    files = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive.getmembers():
            if member.name.endswith(".py") and (content := archive.extractfile(member)):
                files[PurePosixPath(member.name)] = content.read()
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path}\n".encode() + files[path])
    return digest.hexdigest()


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_its_commit_has_the_source_that_made_it(path: Path) -> None:
    record = RunRecord.read(path)
    assert record.environment.commit is not None
    command = ["git", "rev-parse", "--is-shallow-repository"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.stdout.strip() != "false":
        pytest.skip("needs the whole history of the project")
    assert (digest_at(record.environment.commit) == record.code) == (path.stem not in CHANGED)
