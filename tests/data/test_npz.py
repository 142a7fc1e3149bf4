"""NumPy archives in: what is read how, and what is refused."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from otad.data.npz import as_inputs, load_npz, read_npz
from otad.errors import InputError

X = np.arange(40, dtype=np.float64).reshape(10, 4)
Y = np.array([3, 7] * 5)


def save(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def test_whole_numbers_and_text_are_classes_and_other_numbers_targets(tmp_path: Path) -> None:
    for y, classes in ((Y, ("3", "7")), (np.array(["b", "a"] * 5), ("a", "b")), (Y / 2, ())):
        data = load_npz(save(tmp_path / "a.npz", x=X, y=y))
        assert (data.task, data.classes) == ("classification" if classes else "regression", classes)
    overruled = load_npz(save(tmp_path / "d.npz", x=X, y=Y), task="regression")
    assert set(overruled.train_y.tolist()) == {3.0, 7.0}


def test_a_test_part_is_taken_as_it_is_and_else_held_out_by_seed(tmp_path: Path) -> None:
    given = load_npz(save(tmp_path / "a.npz", x=X, y=Y, test_x=X[:2] + 1, test_y=Y[:2]))
    torch.testing.assert_close(given.train_x, torch.tensor(X).float())
    torch.testing.assert_close(given.test_x, torch.tensor(X[:2] + 1).float())
    assert given.test_y.tolist() == [0, 1]
    path = save(tmp_path / "b.npz", x=X, y=Y)
    held = load_npz(path, test_fraction=0.4, seed=1)
    assert (len(held.train_x), len(held.test_x)) == (6, 4)
    rows = torch.cat([held.train_x, held.test_x])
    labels = torch.cat([held.train_y, held.test_y])
    order = rows[:, 0].argsort()
    torch.testing.assert_close(rows[order], torch.tensor(X).float())
    assert labels[order].tolist() == [0, 1] * 5


def test_images_get_a_channel_and_bytes_become_shares_of_255(tmp_path: Path) -> None:
    pixels = np.array([[[0, 51], [102, 255]]], dtype=np.uint8)
    read = as_inputs(pixels, tmp_path, "x")
    torch.testing.assert_close(read, torch.tensor([[[[0.0, 0.2], [0.4, 1.0]]]]))
    assert as_inputs(np.zeros((2, 3, 4, 4)), tmp_path, "x").shape == (2, 3, 4, 4)
    levels = as_inputs(np.array([[0, 255]], dtype=np.uint8), tmp_path, "x")
    assert levels.tolist() == [[0.0, 255.0]]  # a vector, in its own units


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "expected the arrays x, y, got x"),
        ({"x": X, "y": Y[:3]}, "10 y.* got 3"),
        ({"x": X, "y": Y, "test_x": X}, "both test_x and test_y"),
        ({"x": X, "y": Y, "test_x": X, "test_y": Y + 1}, "3, 7, got '4' in row 0"),
        ({"x": X[:, 0], "y": Y}, r"shape \(N,d\), \(N,H,W\) or \(N,C,H,W\), got \(10,\)"),
        ({"x": X.astype(str), "y": Y}, "x: expected numbers"),
        ({"x": X, "y": Y / 2}, "y: .*whole numbers or text.*float64"),
        ({"x": X, "y": Y[:, None]}, r"y: .*whole numbers or text.*\(10, 1\)"),
        ({"x": np.where(X == 5, np.nan, X), "y": Y}, "expected finite values, got nan"),
        ({"x": X, "y": np.zeros(10, int)}, "expected two classes or more"),
        ({"x": X.reshape(10, 2, 2), "y": Y}, r"expected values in \[0.0, 1.0\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_npz(save(tmp_path / "bad.npz", **arrays), task="classification")


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "executed"

    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (mark,)

    renamed = tmp_path / "renamed.npz"
    renamed.write_bytes(pickle.dumps(Hostile()))
    inside = save(tmp_path / "inside.npz", x=np.array([Hostile()], dtype=object), y=Y)
    truncated = tmp_path / "truncated.npz"
    truncated.write_bytes(save(tmp_path / "whole.npz", x=X, y=Y).read_bytes()[:200])
    for path in (renamed, inside, truncated):
        with pytest.raises(InputError, match="not a readable NPZ file"):
            load_npz(path)
    assert not mark.exists()
    with (tmp_path / "single.npz").open("wb") as stream:
        np.save(stream, X)
    with pytest.raises(InputError, match="got a single array"):
        load_npz(tmp_path / "single.npz")


@pytest.mark.parametrize("compressed", [False, True])
def test_no_damage_is_more_than_an_unreadable_file(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "damaged.npz"
    (np.savez_compressed if compressed else np.savez)(path, x=X[:2, :1])
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 128]) + whole[place + 1 :])
        with contextlib.suppress(InputError):  # some bytes, such as dates, mean nothing
            read_npz(path, ("x",))
