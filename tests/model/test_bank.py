"""The feature bank: what goes in comes out, from memory or file, and no other file is believed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from otad.errors import InputError
from otad.io import tensor_files
from otad.io.tensor_files import fingerprint_of
from otad.model.bank import FeatureBank
from otad.model.defend import defend
from otad.model.otad import OTAD
from otad.nets import Backbone, fc_resnet

N, D = 57, 5
WIDTH = torch.linspace(-1, 1, 3 * D).view(3, D)


def net(x: Tensor) -> tuple[Tensor, Tensor]:
    embedded = x.flatten(1) @ WIDTH
    return embedded, embedded.tanh()


def images(n: int = N) -> tuple[Tensor, Tensor]:
    x = torch.rand(n, 3, 1, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(n) % 4


def build(path: Path | None = None, *, y: Tensor | None = None, **options) -> FeatureBank:
    x, labels = images()
    settings = {"fingerprint": "one net", "batch_size": 10, "path": path} | options
    return FeatureBank.build(net, x, labels if y is None else y, **settings)


def assert_same(bank: FeatureBank, other: FeatureBank) -> None:
    for name in ("inputs", "features", "labels"):
        mine, theirs = getattr(bank, name), getattr(other, name)
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    assert bank.fingerprint == other.fingerprint


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bank.safetensors"
    build().save(path)
    return path


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", [False, True])
def test_memory_stream_and_save_agree(tmp_path: Path, dtype, target) -> None:
    x, y = images()
    y = y.to(torch.float64) / 3 if target else y.to(torch.int32)
    inside = build(dtype=dtype, y=y)
    embedded, features = net(x)
    assert torch.equal(inside.inputs, embedded.to(dtype))
    assert torch.equal(inside.features, features.to(dtype))
    assert torch.equal(inside.labels, y if target else y.long())
    assert (len(inside), inside.dim, inside.dtype) == (N, D, dtype)

    streamed, saved = tmp_path / "new" / "streamed.safetensors", tmp_path / "saved.safetensors"
    assert_same(build(streamed, dtype=dtype, y=y), inside)
    inside.save(saved)
    assert streamed.read_bytes() == saved.read_bytes()
    assert os.listdir(streamed.parent) == [streamed.name]
    assert_same(FeatureBank.load(saved), inside)
    assert_same(FeatureBank.load(saved, mmap=False), inside)
    ordinary = load_file(saved)  # a safetensors file like any other
    assert set(ordinary) == {"inputs", "features", "labels"}
    assert torch.equal(ordinary["features"], inside.features)


def test_batches_and_progress(tmp_path: Path) -> None:
    sizes, steps = [], []

    def watched(x: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(len(x))
        assert not torch.is_grad_enabled()
        return net(x)

    x, y = images()
    options = {"fingerprint": "x", "batch_size": 20, "path": tmp_path / "bank"}
    bank = FeatureBank.build(watched, x, y, **options, progress=lambda *it: steps.append(it))
    assert sizes == [20, 20, 17]  # one pass
    assert steps == [(20, N), (40, N), (N, N)]
    torch.testing.assert_close(bank.inputs, build(batch_size=1).inputs)


def test_only_a_bank_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for y in (images()[1], images()[1] + 1):
        assert torch.equal(build(path, y=y).labels, y)

    def defended(net: Backbone | None, **options: Any) -> OTAD:
        given = {"n_neighbors": 2, "bank_path": path, **options}
        return defend(net, torch.eye(3), torch.arange(3), **given)

    for write in (
        lambda: path.write_text("the data of a user"),
        lambda: save_file({"inputs": torch.eye(3)}, path),
        lambda: tensor_files.write_tensors(path, {"inputs": torch.eye(3)}, {}),
    ):
        write()
        before = path.read_bytes()
        for name, build_other in (
            ("path", lambda: FeatureBank.build(pytest.fail, *images(), fingerprint="x", path=path)),
            ("bank_path", lambda: defended(None, inputs="pixels")),
            ("bank_path", lambda: defended(fc_resnet((3,), 3, blocks=1))),
        ):
            with pytest.raises(InputError, match=f"^{name}: expected a new file, .*got {path}, "):
                build_other()
            assert path.read_bytes() == before
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match=r"got .*, a folder"):
        defended(None, inputs="pixels")


def test_file_is_mapped_and_never_changed(file: Path) -> None:
    before = file.read_bytes()
    bank = FeatureBank.load(file)
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(file) in maps.read_text()
    bank.inputs[0] = 7
    assert file.read_bytes() == before
    FeatureBank.load(file).save(file)  # over the very file it is mapped from
    assert file.read_bytes() == before


def test_selected_rows_make_a_bank() -> None:
    bank, rows = build(), torch.tensor([3, 56, 0])
    small = bank.select(rows)
    for part in ("inputs", "features", "labels"):
        assert torch.equal(getattr(small, part), getattr(bank, part)[rows])
    assert_same(bank.select(rows), small)
    names = {bank.fingerprint, small.fingerprint, bank.select(rows.flip(0)).fingerprint}
    assert len(names) == 3


def test_every_changed_byte_is_noticed(file: Path) -> None:
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(0, header, 7), header, len(whole) // 2, len(whole) - 1]
    for place in places:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(InputError, match="expected"):
            FeatureBank.load(file)
    swapped = whole.replace(b'"inputs"', b'"?"').replace(b'"features"', b'"inputs"')
    file.write_bytes(swapped.replace(b'"?"', b'"features"'))  # all sizes fit
    with pytest.raises(InputError, match=r"checksum .* damaged"):
        FeatureBank.load(file)
    assert len(FeatureBank.load(file, verify=False)) == N  # overlooked on request


@pytest.mark.parametrize("shards", [None, 2])
def test_a_file_that_is_replaced_after_it_was_verified_is_verified_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int | None
) -> None:
    path = tmp_path / "bank"
    build().save(path, shards=shards)
    file = path / "bank-00002-of-00002.safetensors" if shards else path
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    check_seal = tensor_files.check_seal

    def verify_then_replace(checked: Path) -> None:
        check_seal(checked)
        if checked == file:
            (tmp_path / "new").write_bytes(damaged)
            os.replace(tmp_path / "new", file)

    monkeypatch.setattr(tensor_files, "check_seal", verify_then_replace)
    with pytest.raises(InputError, match="the file is damaged"):
        FeatureBank.load(path)


@pytest.mark.parametrize("stop", [0, 4, 8, 100, -1, -400])
def test_truncated_file(file: Path, stop: int) -> None:
    file.write_bytes(file.read_bytes()[:stop])
    for verify in (True, False):
        with pytest.raises(InputError, match="expected a whole safetensors file, got"):
            FeatureBank.load(file, verify=verify)


def test_other_banks_and_formats(tmp_path: Path, file: Path, monkeypatch) -> None:
    FeatureBank.load(file, expect_fingerprint="one net")
    with pytest.raises(InputError, match="data another net, got the bank of one net"):
        FeatureBank.load(file, expect_fingerprint="another net")
    path = tmp_path / "other.safetensors"
    save_file({"inputs": torch.zeros(2, 2)}, path)
    with pytest.raises(InputError, match="expected a feature bank, got other tensors"):
        FeatureBank.load(path)
    path.unlink()
    monkeypatch.setattr("otad.model.bank.VERSION", "2")
    build(path)
    monkeypatch.undo()
    with pytest.raises(InputError, match="expected a bank of version 1, got 2"):
        FeatureBank.load(path)
    with pytest.raises(FileNotFoundError):
        FeatureBank.load(tmp_path / "nothing")


def test_values_that_are_not_finite_and_widths_that_change(tmp_path: Path) -> None:
    """In a sealed file, in memory, and from a net: refused everywhere, and nothing is left."""
    path = tmp_path / "bank.safetensors"
    bank = build()
    bank.features[9, 2] = torch.nan  # behind its back, after all checks
    bank.save(path)
    with pytest.raises(InputError, match=r"features from row 0 on: .* got nan at \(9, 2\)"):
        FeatureBank.load(path)
    with pytest.raises(InputError, match="features from row 0 on"):
        FeatureBank(bank.inputs, bank.features, bank.labels, "x")
    path.unlink()
    x, y = images()
    x[33] = torch.inf
    for target in (None, path):
        with pytest.raises(InputError, match="inputs from row 30 on"):
            FeatureBank.build(net, x, y, fingerprint="x", batch_size=10, path=target)
    x[33] = 1e5
    with pytest.raises(InputError, match=r"inputs from row 32 on, as torch.float16: .* got -?inf"):
        FeatureBank.build(net, x, y, fingerprint="x", batch_size=8, dtype=torch.float16, path=path)
    widths = iter([3, 2])
    with pytest.raises(InputError, match=r"inputs: expected shape \(27, 3\)"):
        FeatureBank.build(
            lambda batch: (batch.flatten(1)[:, : next(widths)],) * 2,
            x, y, fingerprint="x", batch_size=30, path=path,
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


ONES = torch.ones(3, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": ONES.double()}, "inputs: expected dtype float16 or bfloat16 or float32"),
        ({"features": ONES[:2]}, r"features: expected shape \(3, 2\) like the inputs"),
        ({"features": ONES.half()}, "features: expected dtype float32 like inputs"),
        ({"labels": torch.zeros(2).long()}, r"labels: expected shape \(3,\) one for each input"),
        ({"labels": torch.zeros(3).int()}, "labels: .* int64 or float32 or float64, got int32"),
        ({"labels": torch.tensor([0, -1, 0])}, "labels: expected class numbers from 0, got -1"),
        ({"labels": torch.tensor([0, torch.nan, 0])}, "labels: expected finite values"),
        ({"fingerprint": ""}, "fingerprint: expected some text"),
    ],
)
def test_bad_fields(fields, message) -> None:
    good = {"inputs": ONES, "features": ONES, "labels": torch.zeros(3), "fingerprint": "x"}
    FeatureBank(**good)
    with pytest.raises(InputError, match=message):
        FeatureBank(**(good | fields))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": torch.zeros(0, 3)}, "x: expected a torch.Tensor with at least one row"),
        ({"y": [0] * N}, "y: expected a torch.Tensor"),
        ({"y": torch.zeros(N - 1)}, r"labels: expected shape \(57,\)"),
        ({"batch_size": 0}, "batch_size: expected an integer of at least 1"),
        ({"transport": lambda x: (x.flatten(1), x[:, :2, 0])}, "features: .* in the same R"),
        ({"transport": lambda x: (x[:3, :, 0], x[:3, :, 0])}, r"inputs: expected shape \(57, 3\)"),
        ({"transport": lambda x: (x, x)}, r"inputs: expected 2 axes"),
    ],
)
def test_bad_builds(options, message) -> None:
    x, y = images()
    with pytest.raises(InputError, match=message):
        FeatureBank.build(**({"transport": net, "x": x, "y": y, "fingerprint": "x"} | options))


def test_fingerprint() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
    x = torch.arange(6.0).view(3, 2)
    data, state = {"x": x, "y": x[:, 0]}, dict(reversed(layer.state_dict().items()))
    base = fingerprint_of(layer, data)
    assert fingerprint_of(state, dict(reversed(data.items()))) == base
    others = [
        fingerprint_of(layer),
        fingerprint_of(layer, {"x": x}),
        fingerprint_of(layer, {"x": x[:, 0], "y": x}),
        fingerprint_of(layer, data | {"x": x.view(2, 3)}),
        fingerprint_of(layer, data | {"x": x.bfloat16()}),
        fingerprint_of(layer, data, "note"),
        fingerprint_of({**state, "bias": state["bias"] + 1e-7}, data),
        fingerprint_of({"weight": state["bias"], "bias": state["weight"]}, data),
    ]
    assert len({base, *others}) == 1 + len(others)
    with pytest.raises(InputError, match=r"net/a: expected a torch\.Tensor, got int"):
        fingerprint_of({"a": 3})
