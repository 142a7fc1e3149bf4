"""A bank in many files is the bank in one file: rows, answers, and what damage is found."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from factories import exact, images
from torch import Tensor

import otad
from otad.errors import InputError
from otad.io.mapped_rows import JoinedRows, block_of, gathered
from otad.model.bank import FeatureBank
from otad.model.bank_shards import INDEX, damaged_shards, join_shards, shard_name

N, D = 41, 5


@pytest.fixture
def bank(generator: torch.Generator) -> FeatureBank:
    inputs = torch.rand(N, D, generator=generator).half()
    return FeatureBank(inputs, inputs + 1, torch.arange(N) % 3, "net and data")


def assert_same(found: FeatureBank, expected: FeatureBank) -> None:
    for name in ("inputs", "features", "labels"):
        one, two = (getattr(bank, name) for bank in (found, expected))
        assert one.dtype == two.dtype
        assert torch.equal(block_of(one, 0, len(one)), two)
    assert found.fingerprint == expected.fingerprint
    assert found.sample() == expected.sample()


@pytest.mark.parametrize("shards", [1, 3, N])
def test_shards_are_read_as_one_bank(tmp_path: Path, bank: FeatureBank, shards: int) -> None:
    checksum = bank.save(tmp_path, shards=shards)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {INDEX, *(shard_name(number + 1, shards) for number in range(shards))}
    mapped = FeatureBank.load(tmp_path, expect_checksum=checksum)
    assert isinstance(mapped.inputs, JoinedRows)
    assert_same(mapped, bank)
    assert_same(FeatureBank.load(tmp_path, mmap=False), bank)
    rows = torch.tensor([[40, 0], [13, 14], [0, 40]])
    for part in ("inputs", "features"):
        assert torch.equal(gathered(getattr(mapped, part), rows), getattr(bank, part)[rows])
    mapped.save(tmp_path / "again")  # to one file
    assert_same(FeatureBank.load(tmp_path / "again"), bank)


def test_joined_rows_are_a_tensor(generator: torch.Generator) -> None:
    """Whatever is computed from them is computed from all rows, and nothing changes them."""
    whole = torch.rand(10, 3, generator=generator)
    joined = JoinedRows(whole.split([4, 1, 5]))
    rows = torch.tensor([[9, 0], [4, -1]])
    for work in (
        lambda it: it[3],
        lambda it: it[-2],
        lambda it: it[2:7],
        lambda it: it[3:-2],
        lambda it: it[20:],
        lambda it: it[::3],
        lambda it: it[:, 1:],
        lambda it: it[rows],
        lambda it: it[whole[:, 0] > 0.5],
        lambda it: it.index_select(0, rows[0]),
        lambda it: it.detach().double() @ whole.double().T,
        lambda it: 2 * it + whole,
        lambda it: it.split(3)[1],
        lambda it: torch.cat([it, it]),
        lambda it: gathered(it, rows[:1]),
        lambda it: block_of(it, 3, 100),
    ):
        assert torch.equal(work(joined), work(whole))
        with torch.inference_mode():
            assert torch.equal(work(joined), work(whole))
    for change in (lambda: joined.add_(1), lambda: joined.__setitem__(0, 7)):
        with pytest.raises(InputError, match="expected no change"):
            change()
    with pytest.raises(InputError, match="expected 0 to 9"):
        gathered(joined, torch.tensor([10]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_shards_are_written_by_several_processes(tmp_path: Path, bank: FeatureBank) -> None:
    """One of them is killed. What the others wrote stays, and only the rest is written again."""
    for number in (1, 2, 3):
        if not (child := os.fork()):
            try:
                if number != 2:
                    bank.save_shard(tmp_path, number, 3)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    with pytest.raises(InputError, match="expected shard 2 of 3, got no file"):
        join_shards(tmp_path)
    with pytest.raises(InputError, match=INDEX):
        FeatureBank.load(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert set(before) == {shard_name(1, 3), shard_name(3, 3)}
    damaged = tmp_path / shard_name(3, 3)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    bank.save(tmp_path, shards=3)
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert after[shard_name(1, 3)] == before[shard_name(1, 3)]
    assert_same(FeatureBank.load(tmp_path), bank)


def test_shards_of_another_bank_are_replaced(tmp_path: Path, bank: FeatureBank) -> None:
    bank.save(tmp_path, shards=2)
    other = FeatureBank(bank.inputs + 1, bank.features, bank.labels, bank.fingerprint)
    other.save(tmp_path, shards=2)
    assert_same(FeatureBank.load(tmp_path), other)
    FeatureBank(bank.inputs, bank.features, bank.labels, "other").save_shard(tmp_path, 2, 2)
    with pytest.raises(InputError, match=f"{shard_name(2, 2)}: expected a shard like the first"):
        join_shards(tmp_path)
    bank.save_shard(tmp_path, 1, 4)
    with pytest.raises(InputError, match="expected the shards of one bank, got shards of 2, 4"):
        join_shards(tmp_path)
    for shards in (0, N + 1, 2**40):
        with pytest.raises(InputError, match="shards: expected"):
            bank.save(tmp_path, shards=shards)


def test_every_damaged_shard_is_named(tmp_path: Path, bank: FeatureBank) -> None:
    bank.save(tmp_path, shards=6)
    assert damaged_shards(tmp_path) == {}
    changed, cut, gone, swapped = (tmp_path / shard_name(number, 6) for number in (1, 2, 4, 5))
    content = bytearray(changed.read_bytes())
    content[-1] ^= 1
    changed.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:-9])
    gone.unlink()
    shutil.copy(tmp_path / shard_name(6, 6), swapped)
    found = damaged_shards(tmp_path)
    assert set(found) == {path.name for path in (changed, cut, gone, swapped)}
    with pytest.raises(InputError, match="expected 6 whole shards, got 4 damaged") as refused:
        FeatureBank.load(tmp_path)
    assert all(name in str(refused.value) for name in found)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["metadata"].update(fingerprint="another"),
        lambda index: index.update(shards={"../bank": {"points": N, "checksum": ""}}),
        lambda index: index.update(version=2),
        lambda index: index.pop("metadata"),
        lambda index: index.update(shards=[1, 2]),
        lambda index: index.update(shards=None),
    ],
)
@pytest.mark.parametrize("sealed", [False, True])
def test_a_forged_index_is_refused(tmp_path: Path, bank: FeatureBank, change, sealed) -> None:
    from otad.io.codec import digest_of

    bank.save(tmp_path, shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    stored = index.pop("checksum")
    change(index)
    checksum = digest_of(index, length=64) if sealed else stored
    (tmp_path / INDEX).write_text(json.dumps(index | {"checksum": checksum}))
    with pytest.raises(InputError, match="expected"):
        FeatureBank.load(tmp_path)


def test_a_model_with_shards_gives_the_same_answers(tmp_path: Path) -> None:
    x, _ = images(6, seed=5)
    for scope in ("local", "global"):
        model = exact("fc", scope=scope)
        folder = tmp_path / scope
        model.save(folder)
        model.save(folder, shards=3)
        (shards,) = folder.glob("bank-*")
        assert len(list(shards.iterdir())) == 4

        def compare(found: otad.OTAD, model: otad.OTAD = model) -> None:
            one, two = found.trace(x), model.trace(x)
            assert torch.equal(one.outputs, two.outputs)
            assert torch.equal(one.neighbors.indices, two.neighbors.indices)
            assert torch.equal(one.neighbors.distances, two.neighbors.distances)
            radius: Tensor = otad.certify(found, x).radius
            assert torch.equal(radius, otad.certify(model, x).radius)

        compare(otad.load(folder))
        mapped = otad.load(folder, resident=False)
        assert isinstance(mapped.bank_inputs, JoinedRows)
        compare(mapped)
        compare(mapped.replace(n_neighbors=mapped.n_neighbors))
        (shards / shard_name(2, 3)).unlink()
        with pytest.raises(InputError, match=shard_name(2, 3)):
            otad.load(folder)
        model.save(folder)  # the shards are removed
        assert [path.is_file() for path in folder.glob("bank-*")] == [True]
        compare(otad.load(folder))
