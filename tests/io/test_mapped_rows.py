"""Rows read from a file are the rows of the tensor mapped from it, and nothing else is touched."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from together import forked
from torch import Tensor

from otad.cip import BankProblem, ExactCip
from otad.errors import InputError
from otad.io import mapped_rows
from otad.io.mapped_rows import FileRows, block_of, gathered, in_file, remember
from otad.model.bank import FeatureBank

N, D = 40, 7
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def mapped(path: Path, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A tensor mapped from a file that also holds others, and its copy in memory."""
    drawn = torch.randn(N, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    save_file({"before": torch.arange(5), "points": drawn, "z": torch.ones(3)}, path)
    with safe_open(path, framework="pt") as file:
        points = file.get_tensor("points")
    remember(path, {"points": points})
    assert in_file(points) is not None
    return points, drawn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("least", [1, 2**21])  # bytes that are read into huge pages
def test_rows_are_those_of_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(mapped_rows, "_HUGE_PAGE", least)
    points, drawn = mapped(tmp_path / "file", dtype)
    generator = torch.Generator().manual_seed(2)
    for shape in ((0,), (3, 0), (1,), (5,), (2, 4), (3, 1, 5)):
        indices = torch.randint(0, N, shape, generator=generator)
        for rows in (indices, indices.flip(0), torch.cat([indices, indices])):
            assert torch.equal(gathered(points, rows), drawn[rows])
            assert torch.equal(gathered(drawn, rows), drawn[rows])
    for start, stop in ((0, 1), (3, 9), (0, N), (N - 2, N + 5), (4, 4), (N, N + 3)):
        assert torch.equal(block_of(points, start, stop), drawn[start:stop])
        assert torch.equal(block_of(drawn, start, stop), drawn[start:stop])
    for bad in (-1, N):
        with pytest.raises(InputError, match=rf"rows: expected 0 to {N - 1}, the rows of .*file"):
            gathered(points, torch.tensor([[0, bad]]))


def test_rows_are_copies_and_those_of_changed_tensors_are_not_read(tmp_path: Path) -> None:
    points, drawn = mapped(tmp_path / "file")
    for other in (drawn, points.clone(), points[:5]):
        assert in_file(other) is None
    gathered(points, torch.tensor([3]))[:] = 0
    block_of(points, 0, 5)[:] = 0
    assert torch.equal(points, drawn)
    points[3] = 7.0
    assert in_file(points) is None
    assert torch.equal(gathered(points, torch.tensor([3, 4]))[0], torch.full((D,), 7.0))
    assert torch.equal(block_of(points, 4, 6), drawn[4:6])


def test_32_bits_of_an_index_count_the_bytes_of_a_large_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as sparse:
        sparse.seek(2**31)  # takes no room on the disk
        sparse.write(bytes(range(8)))
    points = torch.empty(1, dtype=torch.uint8).expand(2**28 + 1, 8)
    rows = FileRows(file, 0, points).read(torch.tensor([len(points) - 1], dtype=torch.int32))
    assert rows.tolist() == [list(range(8))]


def test_changes_in_inference_mode_are_noticed(tmp_path: Path) -> None:
    """Of a tensor made there torch does not count them, so that one is not read from its file."""
    points, drawn = mapped(tmp_path / "file")
    with torch.inference_mode():
        assert torch.equal(gathered(points, torch.tensor([8, 2])), drawn[[8, 2]])
        points.add_(1000)
        assert torch.equal(gathered(points, torch.tensor([8, 2])), drawn[[8, 2]] + 1000)
        with safe_open(tmp_path / "file", framework="pt") as file:
            points = file.get_tensor("points")
        remember(tmp_path / "file", {"points": points})
        assert in_file(points) is None
        points.add_(1000)
        assert torch.equal(gathered(points, torch.tensor([8, 2])), drawn[[8, 2]] + 1000)
        assert torch.equal(block_of(points, 4, 6), drawn[4:6] + 1000)


def test_the_file_stays_open_when_its_name_is_given_to_another(tmp_path: Path) -> None:
    points, drawn = mapped(tmp_path / "file")
    save_file({"points": torch.zeros(N, D)}, tmp_path / "other")
    os.replace(tmp_path / "other", tmp_path / "file")
    rows = torch.arange(N)
    assert torch.equal(gathered(points, rows), drawn)
    (tmp_path / "file").unlink()
    assert torch.equal(gathered(points, rows), drawn)


def test_a_file_that_is_truncated_while_it_is_read_is_named(tmp_path: Path) -> None:
    points, drawn = mapped(tmp_path / "file")
    whole = (tmp_path / "file").stat().st_size
    os.truncate(tmp_path / "file", whole - 12)  # the last tensor
    assert torch.equal(gathered(points, torch.tensor([N - 1])), drawn[[N - 1]])
    os.truncate(tmp_path / "file", whole - 13)
    for read in (lambda: gathered(points, torch.tensor([3])), lambda: block_of(points, 0, N)):
        with pytest.raises(InputError, match=r"file: expected .* bytes.*truncated"):
            read()


def test_the_file_is_closed_with_the_tensor(tmp_path: Path) -> None:
    opened = Path("/proc/self/fd")
    if not opened.exists():
        opened = Path("/dev/fd")
    gc.collect()  # what other tests left
    before = len(list(opened.iterdir()))
    points, _ = mapped(tmp_path / "file")
    assert len(list(opened.iterdir())) > before
    del points
    gc.collect()
    assert len(list(opened.iterdir())) == before


def test_a_bank_reads_rows_of_its_file(tmp_path: Path) -> None:
    x = torch.rand(N, D, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "bank"
    inside = FeatureBank(x, x + 1, torch.arange(N) % 2, "net")
    inside.save(path)
    bank = FeatureBank.load(path)
    assert in_file(bank.inputs) is not None
    assert in_file(bank.features) is not None
    rows = torch.tensor([30, 4, 7])
    assert torch.equal(bank.select(rows).features, inside.select(rows).features)
    assert in_file(FeatureBank.load(path, mmap=False).inputs) is None
    with torch.inference_mode():  # read from the file until it is changed
        bank = FeatureBank.load(path)
        assert in_file(bank.inputs) is not None
        bank.inputs.add_(1000)
        assert torch.equal(gathered(bank.inputs, rows), x[rows] + 1000)
        assert torch.equal(gathered(bank.features, rows), x[rows] + 1)
    for shape in ((0, D), ()):
        none = {"inputs": torch.zeros(shape), "features": torch.zeros(shape)}
        metadata = {"format": "otad-feature-bank", "version": "1", "fingerprint": "net"}
        save_file(none | {"labels": torch.zeros(3)}, path, metadata)
        with pytest.raises(InputError, match="inputs: expected"):
            FeatureBank.load(path, verify=False)


def mapped_bytes() -> int:
    """Of files, as far as this process has them in memory."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"RssFile:\s+(\d+)", text)[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs RssFile of the system")
def test_a_file_does_not_become_resident(tmp_path: Path) -> None:
    """Neither by checking it nor by solving; the sum of a map shows that it could."""
    x = torch.rand(1500, 4096, generator=torch.Generator().manual_seed(0)).half()
    FeatureBank(x, x, torch.zeros(len(x), dtype=torch.int64), "net").save(tmp_path / "bank")
    solve = ExactCip(on_failure="abstain")

    def work(_: int) -> None:
        bank = FeatureBank.load(tmp_path / "bank")
        few, four = bank.inputs[:3].float(), bank.select(torch.arange(4))
        pairs = torch.tensor([[0, 1], [1, 2], [2, 3]])
        solve(BankProblem(few, four.inputs, four.features, pairs, 2.0))  # loads the libraries
        before = mapped_bytes()
        bank = FeatureBank.load(tmp_path / "bank")
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):
            indices = torch.randint(len(bank), (3, 2), generator=generator)
            solve(BankProblem(few, bank.inputs, bank.features, indices, 2.0))
        asked = mapped_bytes() - before
        bank.features.sum()
        (tmp_path / "found").write_text(f"{asked} {mapped_bytes() - before}")

    assert forked(work, 1) == [0]
    asked, whole = map(int, (tmp_path / "found").read_text().split())
    assert asked < x.nbytes / 2  # both halves of the bank are that large
    assert whole > x.nbytes
